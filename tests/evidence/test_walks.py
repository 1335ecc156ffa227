"""The walks through the code that record 0089 counts."""

from evidence.walks import walked


def test_a_walk_has_the_files_whose_functions_ran() -> None:
    found = walked("e")
    assert {"http1/heads.py", "proxy/gate.py", "stores/sqlite/guard/values.py"} <= found["functions"].keys()
    assert found["files"] < 30 and not any(name.startswith("values/") for name in found["functions"])
