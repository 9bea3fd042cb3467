"""Pages that promise something name the tests that hold it, and these exist."""

from __future__ import annotations

import re

import pytest
from page_reading import ROOT

PAGES = ("edge-security", "peers")
NAMED = re.compile(r"`(test_[a-z0-9_]+)`")


@pytest.fixture(scope="module")
def written() -> set[str]:
    return {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page, written):
    named = NAMED.findall((ROOT / "docs" / f"{page}.md").read_text())
    assert len(named) >= 20
    assert sorted(set(named) - written) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_row_that_says_what_a_stranger_gets_names_a_test(page):
    """Tables of "who", "a peer" and limits, but for rows that promise nothing, and one that is tested as a whole."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    begins = re.compile(r"^\| (?:who|a peer[^|]*|limit) \| ", re.MULTILINE)
    tables = [part.split("\n\n")[0] for part in begins.split(text)[1:]]
    assert tables
    for table in tables:
        place = text.index(table)
        before = text[max(0, place - 600) : place]
        # One test for all rows, named above, or the answer to who can do what.
        if "Tested by `test_" in before or "Who can do what" in before:
            continue
        for row in table.splitlines()[2:]:
            assert NAMED.search(row) or "see below" in row, row
