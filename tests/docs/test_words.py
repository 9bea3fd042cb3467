"""The pages stay short enough to be read: words of prose, without code, tables, verdicts and the book of results."""

from __future__ import annotations

import re
from pathlib import Path

from page_reading import PAGES, ROOT

MOST = 35_000
GENERATED = {"docs/choose/verdicts.md", "docs/results"}


def words(text: str) -> int:
    """Return the number of words that stand outside of fences, indented blocks, tables, verdicts and hidden comments.

    The description of a figure counts once: its file for the other colour scheme repeats it.
    """
    text = re.sub(r"^```.*?^```$|^!\[.*#only-dark\)$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith(("|", "    ", "> Verdict")))


def written(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return not any(name.startswith(each) for each in GENERATED)


def test_words_of_prose_are_counted() -> None:
    assert words("# A title\n\nThree more words.\n\n| a | b |\n\n```python\nx = 1\n```\n\n    indented code\n") == 6
    assert words("Two words. <!-- Tests:\n`test_it`. -->\n") == 2


def test_all_pages_together_are_read_in_a_few_hours() -> None:
    counted = {path: words(path.read_text("utf-8")) for path in PAGES if written(path)}
    assert len(counted) > 60
    assert sum(counted.values()) <= MOST, sorted(counted.items(), key=lambda pair: -pair[1])[:10]
