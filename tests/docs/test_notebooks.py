"""The tutorials that are notebooks: small, without traces of a machine, and a run prints what is stored."""

from __future__ import annotations

import re
from pathlib import Path

import notebooks
import pytest

PATHS = notebooks.paths()
NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)( %)?")


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in notebooks.read(path)["cells"] if cell["cell_type"] == kind]


def near(found: str, stored: str) -> bool:
    """Whether two texts have the same words, and numbers that differ by 2 %, as processors round; percentages, and
    numbers of 50 and more, may differ by one."""
    if NUMBER.sub(r"#\2", found).split() != NUMBER.sub(r"#\2", stored).split():
        return False
    values = [[(float(n.replace(",", "")), bool(unit)) for n, unit in NUMBER.findall(text)] for text in (found, stored)]
    return all(
        abs(a - b) <= (max(1.0, 0.02 * b) if percent or b >= 50 else 0.02 * b)
        for (a, _), (b, percent) in zip(*values, strict=True)
    )


def test_numbers_that_are_near_and_words_that_differ() -> None:
    assert near("up 3.06 MB, accuracy 97 %", "up  3.06 MB, accuracy 98 %")
    assert near("the clients' images 20 %", "the clients' images 19 %")
    assert not near("the clients' images 21 %", "the clients' images 19 %")
    assert not near("used 11 of 12", "used 12 of 12")
    assert not near("same model: False", "same model: True")
    assert not near("used 12", "used 12, refused 1")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_every_cell_was_run_in_order(path: Path) -> None:
    notebook = notebooks.read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert path.stat().st_size < 60_000
    assert sum(len(text.split()) for text in cells(path, "markdown")) <= 400
    run = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in run] == list(range(1, len(run) + 1))
    outputs = [output for cell in run for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}
    assert max(len(line) for text in cells(path, "code") for line in text.splitlines()) <= 79
    # No date, no folder, and no version of what ran it.
    assert re.findall(r"\d{4}-\d\d-\d\d|/(?:home|root|tmp|usr|work)/|\d+\.\d+\.\d+\"", path.read_text("utf-8")) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_a_page_with_one_title_its_figures_and_links_that_lead_somewhere(path: Path) -> None:
    text, figures = notebooks.page(path)
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert len(re.findall(r"^# ", outside, re.MULTILINE)) == 1
    assert figures
    assert all(figure.rstrip().endswith("</svg>") for figure in figures.values())
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", outside)
    assert {target for target in targets if not (path.parent / target).exists()} == set(figures)
    assert all(f"```python\n{source}\n```" in text for source in cells(path, "code"))
    assert all(printed.rstrip() in text for printed in notebooks.texts(notebooks.read(path)) if "Figure" not in printed)


def test_the_title_says_the_ratios_that_the_notebook_prints() -> None:
    path = notebooks.FOLDER / "compress-an-app.ipynb"
    named = re.findall(r"\d+", cells(path, "markdown")[0].splitlines()[0])
    printed = "".join(notebooks.texts(notebooks.read(path)))
    assert f"uploads: {named[0]} and {named[1]} times smaller" in printed


@pytest.mark.long
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_run_of_a_notebook_prints_what_is_stored(path: Path) -> None:
    stored = list(notebooks.texts(notebooks.read(path)))
    found = list(notebooks.texts(notebooks.executed(path)))
    assert len(found) == len(stored)
    other = [(a, b) for a, b in zip(found, stored, strict=True) if not near(a, b)]
    assert other == [], "run python docs/site/notebooks.py"
