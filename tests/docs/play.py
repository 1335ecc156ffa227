"""Plays the blocks of one page in the current folder. A program of its own, run by test_blocks.py."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from typing import Any

PRINTED = re.compile(r"^\s*print\(.*\)  # (.+)$", re.MULTILINE)
SECONDS_MAX = 240


def play_python(block: dict[str, Any], page: str, namespace: dict[str, Any]) -> None:
    """Run it where the page's earlier blocks ran; what a comment says is printed must be printed."""
    printed = io.StringIO()
    source = "\n" * (block["line"] - 1) + block["text"]  # so that a traceback names the page's own line
    with contextlib.redirect_stdout(printed):
        exec(compile(source, page, "exec", dont_inherit=True), namespace)
    lines = iter(printed.getvalue().splitlines())
    for expected in PRINTED.findall(block["text"]):
        if expected not in lines:  # goes on behind the line that was found before
            raise AssertionError(f"not printed: {expected!r}\n{printed.getvalue()}")


def play_shell(block: dict[str, Any]) -> None:
    subprocess.run(["bash", "-eo", "pipefail", "-c", block["text"]], check=True, timeout=SECONDS_MAX)


def play_console(block: dict[str, Any]) -> None:
    for part in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        done = subprocess.run(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS_MAX,
        )
        if done.stdout.rstrip() != expected.rstrip():
            raise AssertionError(f"$ {command}\n{done.stdout}\ninstead of\n{expected}")


def main() -> None:
    plan = json.load(sys.stdin)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in plan["blocks"]:
        try:
            if block["language"] == "python":
                play_python(block, plan["page"], namespace)
            elif block["language"] == "sh":
                play_shell(block)
            else:
                play_console(block)
        except BaseException as error:
            error.add_note(f"in the block at {plan['page']}:{block['line']}")
            raise


if __name__ == "__main__":
    main()
