"""How guards work, for every store: cells and the guard over them, table specs, SQL engines, answers, operators."""
