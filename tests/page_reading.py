"""What the pages say can be typed: their commands and their blocks of Python, with the place each stands at.

A command is a line of a fenced or indented block, or a span of inline code, that begins with one of :data:`PROGRAMS`.
Environment assignments and a prompt (``$``) may stand before it; lines joined by a backslash, and a comment,
belong to it.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*/README.md"),
    ]
)
PROGRAMS = frozenset({"python", "flwr", "make", "pytest", "pip", "cd", ".venv/bin/python", "source", "."})
PLAIN = frozenset({"", "sh", "console"})
"""Info strings of fences that may hold commands."""

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.S | re.M)
_INDENTED = re.compile(r"(?:\A|(?<=\n\n))    .*\n(?:(?:    .*)?\n)*(?:    .*\Z)?")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_ASSIGNED = re.compile(r"^[A-Z_]+=\S*$")


@dataclass(frozen=True)
class Block:
    """A fenced or indented block: where it begins, its info string (``None`` where it is indented), its text."""

    page: str
    line: int
    info: str | None
    text: str

    @property
    def at(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command with where it stands, what it sets in the environment, and the comment behind it."""

    page: str
    line: int
    environment: tuple[str, ...]
    words: tuple[str, ...]
    comment: str

    @property
    def at(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def text(self) -> str:
        return shlex.join([*self.environment, *self.words])


def name(path: Path) -> str:
    """Return how a page is called: its path from the root."""
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    """Return the fenced and the indented blocks of a page, in order."""
    text = path.read_text(encoding="utf-8")
    bare = _blank(text, _FENCE)
    found = [(_line(text, m.start()), m["info"].strip(), m["text"]) for m in _FENCE.finditer(text)]
    plain = [(_line(bare, m.start()), None, _dedent(m.group())) for m in _INDENTED.finditer(bare) if m.group().strip()]
    return [Block(name(path), *block) for block in sorted([*found, *plain], key=lambda block: block[0])]


@functools.cache
def commands(path: Path) -> list[Command]:
    """Return the commands of a page, in order."""
    text = path.read_text(encoding="utf-8")
    found = [command for block in blocks(path) if block.info in PLAIN | {None} for command in _lines(block)]
    bare = _blank(_blank(text, _FENCE), _INDENTED)
    for m in _SPAN.finditer(bare):
        line = " ".join(m[1].split())
        if (command := _command(name(path), _line(bare, m.start()), line)) is not None:
            found.append(command)
    return sorted(found, key=lambda command: command.line)


def _lines(block: Block) -> Iterator[Command]:
    first = block.line + (block.info is not None)
    lines = block.text.split("\n")
    i = 0
    while i < len(lines):
        start, line = i, lines[i]
        if "<<" in line:  # a document on standard input: it is no command of its own
            end = line.rpartition("<<")[2].strip().strip("'\"")
            while i < len(lines) and lines[i].strip() != end:
                i += 1
        while line.endswith("\\") and i + 1 < len(lines):
            i += 1
            line = f"{line[:-1].rstrip()} {lines[i].strip()}"
        i += 1
        if "<<" not in line and (command := _command(block.page, first + start, line)) is not None:
            yield command


def _command(page: str, line: int, text: str) -> Command | None:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return None
    comment = text.partition(" #")[2].strip()
    if words and words[0] == "$":
        words = words[1:]
    count = next((i for i, word in enumerate(words) if not _ASSIGNED.match(word)), len(words))
    environment, words = tuple(words[:count]), words[count:]
    if len(words) < 2 or words[0] not in PROGRAMS:
        return None
    return Command(page, line, environment, tuple(words), comment)


def _line(text: str, start: int) -> int:
    return text.count("\n", 0, start) + 1


def _blank(text: str, pattern: re.Pattern[str]) -> str:
    """Return ``text`` with blank lines in the place of all that matches."""
    return pattern.sub(lambda m: "\n" * m.group().count("\n"), text)


def _dedent(text: str) -> str:
    return "\n".join(line[4:] for line in text.split("\n")).strip("\n")
