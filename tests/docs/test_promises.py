"""Pages that promise something name the tests that hold it, and these exist."""

from __future__ import annotations

import re

import pytest
from page_reading import ROOT

TABLES = ("background/threat-model", "how-to/connect-clients")
PAGES = (*TABLES, "background/privacy", "systems/record-dp")
SAYS_NOTHING_OF_ITS_OWN = {
    "background/threat-model": {
        "Who sees what": "leads to the pages that promise",
        "What cannot be closed": "what is not promised",
        "Compression protects nothing": "what is not promised",
        "What is not protected": "what is not promised",
    },
    "how-to/connect-clients": {
        "What is not protected": "what is not promised",
    },
    "background/privacy": {
        "Which system": "leads to the pages that promise",
        "Faults of other libraries": "what others do",
        "Sources": "what is not ours",
    },
    "systems/record-dp": {
        "Measured on five clients": "what was measured",
        "Sources": "what is not ours",
    },
}
"""Sections that name no test, by page, and why."""
NAMED = re.compile(r"`(test_[a-z0-9_]+)`")


@pytest.mark.parametrize("page", PAGES)
def test_every_section_names_a_test_or_promises_nothing(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    # What stands before the first heading sums the page up.
    _, *parts = re.split(r"^#{2,3} (.+)$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    # A heading above others has their text.
    bare = {title for title, body in sections.items() if body.strip() and not NAMED.search(body)}
    assert bare == SAYS_NOTHING_OF_ITS_OWN[page].keys()


@pytest.mark.parametrize("page", TABLES)
def test_every_row_that_says_what_a_stranger_gets_names_a_test(page):
    """Tables of "who", "a peer" and limits, but for rows that promise nothing, and one that is tested as a whole.

    Names stand in the rows, or in a comment below the table in as many groups as rows promise something.
    """
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
        rows = [row for row in table.splitlines()[2:] if "see below" not in row]
        below = text[place + len(table) :].lstrip().partition("\n\n")[0].replace("\n", " ")
        if below.startswith("<!-- Tests, row by row: "):
            groups = below.split(";")
            assert len(groups) == len(rows)
            assert all(map(NAMED.search, groups))
            continue
        for row in rows:
            assert NAMED.search(row), row
