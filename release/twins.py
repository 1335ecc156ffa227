"""Writes the blocking twins of asyncio classes: `python -m release.twins`, as `make api` does.

Between a line that begins with GENERATED and the next END, a file has the blocking form of every class above whose name
begins with Async. Nobody edits them, and a test compares them. What differs between the colours otherwise is in bases
that both share, or written by hand in other places of the file.

What is awaited is a coroutine of the core, which `step` runs. It is called as it is where its twin blocks by itself: a
method of the same class, a method of an attribute that is annotated with, or made by, a class named Async (or of an
element of a collection of such objects), and a function that the program has passed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "fenced"
GENERATED = "# generated: "
END = "# end"
WORDS = (
    (r"\bAsync(?=[A-Z])|(?<=\bAbstract)Async", ""),
    (r"\basync (?=(def|with|for)\b)", ""),
    (r"\b__a(?=(enter|exit)__)", "__"),
    (r"\basynccontextmanager\b", "contextmanager"),
    (r'"asyncio"', '"blocking"'),
    (r"\bruntime\.aio\b", "runtime.blocking"),
    (r"\bAioRuntime\b", "BlockingRuntime"),
    (r"\bAwaitable\[object\]", "object"),
    (r"\bredis\.asyncio\b", "redis"),
    (r"\n +If the lease is lost, the body is cancelled\.", ""),
    (r"Belongs to the loop that first uses it", "Connects at first use; safe to share between threads"),
    (r"[,;]? for asyncio\b", ""),
    (r"\ban asyncio program\b", "a program"),
    (r"\bTasks may share\b", "Threads may share"),
    (r"(?<=\W)await (?=[a-z])", ""),
    (r"\bfor (\w+) in (\w+):\n +yield \1\b", r"yield from \2"),
)
"""In code, and in what its docstrings say."""


def twins_of(text: str) -> str:
    """The blocking form of the asyncio classes in this source, without END and what stands behind it."""
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    whole, written = b"".join(lines), []

    def at(line: int | None, column: int | None) -> int:
        assert line is not None
        assert column is not None
        return starts[line - 1] + column

    for kind in ast.parse(text).body:
        if not isinstance(kind, ast.ClassDef) or not kind.name.startswith("Async"):
            continue
        first = min([kind.lineno, *(each.lineno for each in kind.decorator_list)])
        begin, end = starts[first - 1], at(kind.end_lineno, kind.end_col_offset)
        edits: list[tuple[int, int, bytes]] = []
        for node, is_plain in _awaited(kind):
            since, value = at(node.lineno, node.col_offset), at(node.value.lineno, node.value.col_offset)
            until = at(node.end_lineno, node.end_col_offset)
            bare = whole[since - 1 : since] == b"(" and not chr(whole[since - 2]).isidentifier()
            if bare and whole[until : until + 1] == b")":  # `(await x).y`
                since, until = since - 1, until + 1
            edits.append((since, value, b"" if is_plain else b"step("))
            last = at(node.value.end_lineno, node.value.end_col_offset)
            edits.append((last, until, b"" if is_plain else b")"))
        piece = whole[begin:end]
        for since, until, new in sorted(edits, reverse=True):
            piece = piece[: since - begin] + new + piece[until - begin :]
        twin = piece.decode()
        for pattern, word in WORDS:
            twin = re.sub(pattern, word, twin)
        written.append(twin + "\n")
    return "\n\n".join(written)


def _awaited(kind: ast.ClassDef) -> Iterator[tuple[ast.Await, bool]]:
    """What a class awaits, and whether its twin calls that as it is."""
    own = {node.name for node in kind.body if isinstance(node, ast.AsyncFunctionDef)}
    given = {node.arg for node in ast.walk(kind) if isinstance(node, ast.arg)} - {"self"}
    faces = {*_faces(kind), *_elements(kind)}
    for node in ast.walk(kind):
        if isinstance(node, ast.Await):
            called = ast.unparse(node.value.func if isinstance(node.value, ast.Call) else node.value)
            owner, _, method = called.rpartition(".")
            yield node, (owner == "self" and method in own) or owner in faces or called in given


def _faces(kind: ast.ClassDef) -> Iterator[str]:
    """The attributes of `self` whose methods block by themselves in the twin."""
    for node in ast.walk(kind):
        if isinstance(node, ast.AnnAssign):
            made, where = ast.unparse(node.annotation), ast.unparse(node.target)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made, where = ast.unparse(node.value.func).rpartition(".")[2], ast.unparse(node.targets[0])
        else:
            continue
        if made.startswith("Async"):
            yield where if where.startswith("self.") else f"self.{where}"


def _elements(kind: ast.ClassDef) -> Iterator[str]:
    """The variables that loop over objects whose methods block by themselves in the twin."""
    many: set[str] = set()
    for node in ast.walk(kind):
        if (
            isinstance(node, ast.arg | ast.AnnAssign)
            and node.annotation
            and "[Async" in ast.unparse(node.annotation)
        ):
            many.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target))
    for node in ast.walk(kind):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in many:
            many.add(ast.unparse(node.targets[0]))
    for node in ast.walk(kind):
        if isinstance(node, ast.comprehension | ast.For) and ast.unparse(node.iter) in many:
            yield ast.unparse(node.target)


def rewritten(path: Path) -> str:
    """This file, with the twins that it should have: of the classes above, or of the file that the marker names."""
    above, marker, rest = re.split(rf"^({GENERATED}.*\n)", path.read_text(), maxsplit=1, flags=re.MULTILINE)
    _, below = re.split(rf"^{END}\n", rest, maxsplit=1, flags=re.MULTILINE)
    named = re.search(r" of (\w+\.py)", marker)
    source = above if named is None else path.with_name(named[1]).read_text()
    text = f"{above}{marker}\n\n{twins_of(source)}\n\n{END}\n{below}"
    formatted = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(path), "-"]
    return subprocess.run(formatted, input=text, capture_output=True, text=True, check=True).stdout


def files() -> list[Path]:
    """The files that have generated twins."""
    return [path for path in sorted(SOURCE.rglob("*.py")) if f"\n{GENERATED}" in path.read_text()]


if __name__ == "__main__":
    for each in files():
        each.write_text(rewritten(each))
