"""Every advice that an error gives is followed to the letter, and leads to something that works.

A row provokes a text, follows its advice, and says whether the result is right. Texts that advise something are found
in the sources; this test asks for a row for each. A text that only states what is wrong needs none.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from advice import Row, provoked
from page_reading import ROOT

ROWS: tuple[Row, ...] = tuple(
    row for path in sorted(Path(__file__).parent.glob("advice_of_*.py")) for row in import_module(path.stem).ROWS
)
LAYERS = ("fedcomp", "strategies", "clients", "coding", "experiments")
VERBS = (
    "use|set|pass|convert|call|add|give|take|choose|lower|raise|make|run|start|build|send|put|wrap|write|name|try|leave"
    "|remove|install|register|increase|decrease|split|move|copy|declare|drop|train|ask|keep|let|update|select|cast"
    "|delete|allow|mark|free|sample|end"
)
BEFORE = r"(?:^|[;:.] |\(|, |\bor |\band )(?!update (?:vector|answers|and))"  # there an update is a thing
ADVICE = re.compile(rf"{BEFORE}(?:{VERBS})(?=[ ,]|$)|\binstead\b(?! of)", re.IGNORECASE)
LOGGED = ("warning", "error", "warn")


@functools.cache
def texts() -> dict[str, str]:
    """Return the texts of errors and warnings in the sources by where they stand: the file, and how they begin."""
    found = {}
    for path in sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        conflicts = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "conflict"]
        returned = {id(node) for f in conflicts for node in ast.walk(f) if isinstance(node, ast.Return)}
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if id(node) in returned:
                # What fields contradict: whoever made the object gets it as an error.
                text = written(node)
            elif not isinstance(call, ast.Call) or (
                not isinstance(node, ast.Raise) and getattr(call.func, "attr", "") not in LOGGED
            ):
                continue
            else:
                text = "".join(written(argument) for argument in call.args)
            found[f"{path.relative_to(ROOT)}: {text[:160].strip()}"] = text
    return found


def written(node: ast.AST) -> str:
    """Return what is written of a text: its constant parts, and {} for the others."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) for part in node.values)
    return "{}" if isinstance(node, ast.FormattedValue) else "".join(map(written, ast.iter_child_nodes(node)))


def followed(places: dict[str, str]) -> set[str]:
    """Return which places have a row each: of a text that several files have, as many rows as files."""
    files = Counter(places.values())
    return {place for place, text in places.items() if sum(row.text in text for row in ROWS) >= files[text]}


@pytest.mark.long
def test_every_advice_has_a_row():
    places = {place: text for place, text in texts().items() if ADVICE.search(text)}
    assert sorted(set(places) - followed(places)) == [], "a new advice: add a row to a file tests/advice_of_*.py"


@pytest.mark.long
def test_every_row_is_about_a_text_of_the_sources():
    written = texts().values()
    assert [row.text for row in ROWS if not any(row.text in text for text in written)] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=pytest.mark.long if row.long else (), id=row.text) for row in ROWS]
)
def test_the_advice_leads_to_something_that_works(row: Row, tmp_path, caplog):
    said = provoked(row.provoke, tmp_path, caplog)
    for part in re.split(r"\{\}|%[a-z]", row.text):
        assert part in said
    caplog.clear()
    (tmp_path / "followed").mkdir()
    assert row.follow(tmp_path / "followed")
    assert row.text not in caplog.text
