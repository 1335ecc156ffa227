"""The guard in Redis or Valkey: one script checks the marks and runs the commands behind them."""
