"""What the pages show runs, and what they link to exists.

The blocks of one page run in the order of the page, in one temporary folder: ```python in one namespace,
```sh with `bash -e`, ```console command by command (`$ `), each followed by exactly what it prints. In Python,
a comment two spaces behind a `print(...)` is the line that it prints.

A page that names one of SERVERS finds a server there. A port of loopback that a page names is another one when its
blocks run, so that two runs of the tests do not take it from each other.

What must not run is marked by `<!-- not run: why -->` directly before the block, or is no program at all
(```text, ```mermaid and the like).

A page with `<!-- walk: './fenced[postgresql]' -->` is part of the walk: a user without root runs its blocks, in an
environment that has only what pip installs for these words. With `<!-- walk: a clone -->` nothing is installed, and
the folder contains a clone named fenced.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from fenced.drills.relay.ports import free_port
from fenced_testkit.servers.dynamodb import KEYS
from tests.walk.traveller import Traveller

ROOT = Path(__file__).parents[2]
PAGES = [
    *(path for name in ("README", "CONTRIBUTING", "CHANGELOG") if (path := ROOT / f"{name}.md").exists()),
    *sorted((ROOT / "docs").rglob("*.md")),
]
RUN = ("python", "sh", "console")
SHOWN = ("text", "mermaid", "sql", "json", "toml", "yaml", "ini", "make", "diff")
SERVERS = {
    "AMQP_URL": "rabbitmq_url",
    "AWS_ENDPOINT_URL_DYNAMODB": "dynamodb_endpoint",
    "DATABASE_URL": "postgresql_url",
    "MARIADB_URL": "mariadb_url",
    "ETCD_URL": "etcd_url",
    "REDIS_URL": "redis_url",
    "ZOOKEEPER_URL": "zookeeper_url",
}
MAY_RUN = re.compile(rf"^\s*```({'|'.join(RUN)})\b", re.MULTILINE)
LOOPBACK_PORT = re.compile(r"127\.0\.0\.1:(\d+)")
NOT_RUN = re.compile(r"<!-- not run: \S.*-->")
WALK = re.compile(r"^<!-- walk: (.+) -->$", re.MULTILINE)
A_CLONE = "a clone"
SECONDS_MAX = 100
WALK_SECONDS_MAX = 300
PLAYER = Path(__file__).with_name("play.py")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line of its first line of text."""

    language: str
    text: str
    line: int


@cache
def tokens_of(page: Path) -> list[Token]:
    return MarkdownIt().enable("table").parse(page.read_text())


def blocks_of(page: Path) -> Iterator[tuple[Block, str]]:
    """Every fenced block, and what stands directly before it if that is HTML."""
    before = ""
    for token in tokens_of(page):
        if token.type == "fence":
            assert token.map is not None
            yield Block(token.info.strip(), token.content, token.map[0] + 2), before
        before = token.content if token.type == "html_block" else ""


def runnable(page: Path) -> list[Block]:
    return [
        block
        for block, before in blocks_of(page)
        if block.language in RUN and not NOT_RUN.search(before.strip())
    ]


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


def servers_of(text: str, request: pytest.FixtureRequest) -> dict[str, str]:
    """The addresses of the servers that a text names."""
    found = {
        variable: request.getfixturevalue(fixture)
        for variable, fixture in SERVERS.items()
        if variable in text
    }
    return {**KEYS, **found} if "AWS_ENDPOINT_URL_DYNAMODB" in found else found


def plan_of(page: Path) -> str:
    blocks = with_free_ports(runnable(page))
    return json.dumps({"page": shown(page), "blocks": [asdict(block) for block in blocks]})


def with_free_ports(blocks: list[Block]) -> list[Block]:
    named = {port for block in blocks for port in LOOPBACK_PORT.findall(block.text)}
    for port in named:
        free = str(free_port())
        blocks = [replace(block, text=re.sub(rf"\b{port}\b", free, block.text)) for block in blocks]
    return blocks


WALKED = [page for page in PAGES if WALK.search(page.read_text())]


def played() -> Iterator[object]:
    """The pages with blocks; found without a parser, because each worker does this to collect the tests."""
    for page in PAGES:
        text = page.read_text()
        if MAY_RUN.search(text) and page not in WALKED:
            # In the group of RabbitMQ's tests, if it needs one: starting a second one takes long.
            group = [pytest.mark.xdist_group("rabbitmq")] if "AMQP_URL" in text else []
            yield pytest.param(page, marks=group)


@pytest.mark.parametrize("page", list(played()), ids=shown)
def test_blocks_run(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FENCED_")}
    environment |= servers_of(page.read_text(), request)
    environment["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), environment.get("PATH", "")))
    done = subprocess.run(
        [sys.executable, PLAYER],
        input=plan_of(page),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.xdist_group("walk")  # its environments are made once
@pytest.mark.timeout(WALK_SECONDS_MAX + 20)  # pip and make are slow on a busy machine
@pytest.mark.parametrize("page", WALKED, ids=shown)
def test_walk(page: Path, traveller: Traveller, request: pytest.FixtureRequest) -> None:
    """For a user who has installed only what the page says."""
    text = page.read_text()
    (packages,) = WALK.findall(text)
    folder = traveller.folder()
    environment = None
    if packages == A_CLONE:
        traveller.clone_into(folder)
    else:
        environment = traveller.environment(packages)
    done = traveller.run(
        ["python3", "-c", PLAYER.read_text()],
        cwd=folder,
        environment=environment,
        variables=servers_of(text, request),
        given=plan_of(page),
        timeout=WALK_SECONDS_MAX,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_block_says_what_it_is(page: Path) -> None:
    unknown = [
        f"{shown(page)}:{block.line}: {block.language!r} is neither run nor one of {', '.join(SHOWN)}"
        for block, _ in blocks_of(page)
        if block.language not in (*RUN, *SHOWN)
    ]
    assert not unknown


@cache
def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them, and those that are written out."""
    found: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', page.read_text()))
    tokens = tokens_of(page)
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            inline = tokens[index + 1]
            title = "".join(child.content for child in inline.children or () if child.type != "image")
            slug = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
            number = 0
            while (anchor := f"{slug}-{number}" if number else slug) in found:
                number += 1
            found.add(anchor)
    return found


def links_of(page: Path) -> Iterator[str]:
    for token in tokens_of(page):
        if token.type == "html_block":
            yield from re.findall(r'(?:href|src)="([^"]+)"', token.content)
        for child in token.children or ():
            if child.type == "html_inline":
                yield from re.findall(r'(?:href|src)="([^"]+)"', child.content)
            for key in ("href", "src"):
                if isinstance(target := child.attrs.get(key), str):
                    yield target


@pytest.mark.xdist_group("links")  # one worker reads all pages
@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in links_of(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            dead.append(f"{link}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors_of(target)):
            dead.append(f"{link}: no such heading")
    assert not dead


@pytest.mark.xdist_group("links")
def test_every_page_can_be_found_from_the_index() -> None:
    reached = {ROOT / "docs" / "index.md"}
    waiting = list(reached)
    while waiting:
        page = waiting.pop()
        for link in links_of(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target.suffix == ".md" and target.exists() and target not in reached:
                reached.add(target)
                waiting.append(target)
    lost = [shown(page) for page in PAGES if page not in reached and page.is_relative_to(ROOT / "docs")]
    assert not lost
