"""Verdicts on the pages: ``python tests/docs/verdict_pages.py`` writes the words of ``fedcomp.verdicts`` there.

A page of a system names its subjects below its title, one a line: ``> Verdict on `topk`: **recommended**. Why.`` On a
page of several systems such lines stand below the headings of their sections. Adapters have a page among the tasks.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from fedcomp.verdicts import VERDICTS, WORDS, verdict_of

ROOT = Path(__file__).resolve().parents[2]
SYSTEM_PAGES = [*sorted((ROOT / "docs" / "systems").glob("*.md")), ROOT / "docs" / "how-to" / "adapters.md"]
TABLES = ROOT / "docs" / "choose" / "verdicts.md"
LINE = re.compile(r"^> Verdict on `(?P<name>[^`]+)`: .*$", re.M)


def line(name: str) -> str:
    word, reason = verdict_of(name)
    return f"> Verdict on `{name}`: **{word}**. {reason}"


def places(page: Path) -> dict[str, str]:
    """Return what a page is about: names of verdicts below its title or a section's heading, with their anchors."""
    text = page.read_text("utf-8")
    assert re.match(r"# .+\n\n", text)
    found: dict[str, str] = {}
    for heading in re.finditer(r"^(?P<level>#{1,2}) (?P<title>.+)\n\n(?P<block>(?:>.*\n)*)", text, re.M):
        slug = re.sub(r"[^\w -]", "", heading["title"].lower()).replace(" ", "-")
        anchor = f"#{slug}" if heading["level"] == "##" else ""
        found |= {named["name"]: anchor for named in LINE.finditer(heading["block"])}
    return found


def subjects(page: Path) -> list[str]:
    """Return the names of the verdicts on a page, in its order."""
    return list(places(page))


def filled(text: str) -> str:
    """Return a page with the verdicts of the code."""
    return LINE.sub(lambda found: line(found["name"]), text)


def tables() -> str:
    """Return the page of all verdicts."""
    where = {name: (page, anchor) for page in SYSTEM_PAGES for name, anchor in places(page).items()}
    parts = [
        "# Verdicts\n",
        "Every codec and every system has one of four words and the measurement behind it.",
        "`python -m experiments.run --list` prints the same list. To choose by your situation, start with",
        "[Which line do I need?](use-this-when.md)\n",
        "| word | meaning |\n|---|---|",
        *(f"| **{word}** | {meaning} |" for word, meaning in WORDS.items()),
        "\nVerdicts are about measurements of this project, on models of at most 100,000 parameters unless a page",
        "says otherwise. They are not about the papers. Each page that is linked has the numbers and the command.",
    ]
    for section, entries in VERDICTS.items():
        parts += [f"\n## {section}\n", "| name | verdict | why | page |\n|---|---|---|---|"]
        for name, (word, reason) in entries.items():
            other = "background/codecs.md" if section == "Codecs" else "reference/messages.md"
            page, anchor = where.get(name, (ROOT / "docs" / other, ""))
            link = f"[{page.stem}]({Path(os.path.relpath(page, TABLES.parent)).as_posix()}{anchor})"
            parts.append(f"| `{name}` | {word} | {reason} | {link} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    for path in SYSTEM_PAGES:
        path.write_text(filled(path.read_text("utf-8")), "utf-8")
    TABLES.write_text(tables(), "utf-8")
    sys.exit(0)
