"""Docstrings: each example runs as it stands, and titles of sections stand on lines of their own."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest
from page_reading import ROOT

FOLDERS = ("fedcomp", "strategies", "clients", "coding", "experiments")


def modules() -> list[str]:
    """Return the names of the modules in which an example stands."""
    found = sorted(
        path.relative_to(ROOT)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if ">>> " in path.read_text("utf-8")
    )
    return [
        ".".join(("fedcomp", *path.with_suffix("").parts))
        .replace("fedcomp.fedcomp", "fedcomp")
        .removesuffix(".__init__")
        for path in found
    ]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_run(name: str) -> None:
    tests = [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]
    assert tests
    for test in tests:
        told: list[str] = []
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
        runner.run(test, out=told.append)
        assert runner.failures == 0, "".join(told)


def test_titles_in_docstrings_stand_alone() -> None:
    """A page of the reference reads "Notes -----" as part of the paragraph before."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    joined = re.compile(r"^ *[A-Z][a-z]+ -{4,} ", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in files if joined.search(path.read_text("utf-8"))] == []
