"""What the pages say can be typed and clicked: commands, files and links exist."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

import pytest

import fedcomp as fc
from fedcomp.experiments.bench import BENCHMARKS
from fedcomp.experiments.catalog import CATALOG

ROOT = Path(__file__).parent.parent
# The changelog may name what is gone.
PAGES = sorted([*(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"), *(ROOT / "docs").rglob("*.md")])


def page(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=page)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    missing = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert not missing


@functools.cache
def defined_tests() -> frozenset[str]:
    files = (ROOT / "tests").rglob("*.py")
    return frozenset(name for path in files for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_a_test_that_a_page_names_exists(path: Path) -> None:
    missing = set(re.findall(r"`(test_\w+)`", path.read_text())) - defined_tests()
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=page)
def test_commands_name_modules_experiments_and_tests_that_exist(path: Path) -> None:
    text = path.read_text()
    wrong = [m for m in re.findall(r"python -m ([a-z_][\w.]*)", text) if importlib.util.find_spec(m) is None]
    for command, known in (("experiments.run", {*CATALOG, "book"}), ("experiments.bench", BENCHMARKS)):
        wrong += [name for name in re.findall(rf"python -m {command} ([a-z]\w*)", text) if name not in known]
    wrong += [name for name in re.findall(r"pytest ((?:tests|examples)[\w/.]*)", text) if not (ROOT / name).exists()]
    wrong += [name for name in re.findall(r"python (examples/[\w/.]+)", text) if not (ROOT / name).exists()]
    assert not wrong


def test_names_of_the_changelog_are_public() -> None:
    named = set(re.findall(r"`fc\.(\w+)`", (ROOT / "CHANGELOG.md").read_text("utf-8")))
    assert len(named) > 10
    assert named <= set(fc.__all__)
