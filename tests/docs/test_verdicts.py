"""Verdicts stand in one file: every system and codec has one, and every page says what that file says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from verdict_pages import SYSTEM_PAGES, TABLES, filled, subjects, tables

from fedcomp import codecs
from fedcomp.codecs.registry import codecs as registry
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.verdicts import VERDICTS, verdict_of

NAMES = [name for section in VERDICTS.values() for name in section]


def test_every_system_and_codec_has_one_verdict() -> None:
    ours = {
        name
        for name in registry.known()
        if isinstance(kind := registry.find(name), type) and kind.__module__.startswith("fedcomp.")
    }
    assert len(ours) > 30
    assert max(Counter(NAMES).values()) == 1
    assert set(SYSTEMS) | ours <= set(NAMES)
    assert all(system.verdict == verdict_of(name) for name, system in SYSTEMS.items())


def test_a_form_of_a_codec_can_be_made_as_it_is_written() -> None:
    forms = [name for name in VERDICTS["Codecs"] if "(" in name]
    assert len(forms) > 4
    for form in forms:
        arguments = "TopK(0.01), " if form.startswith("ErrorFeedback") else "density=0.01, " if "TopK" in form else ""
        made = eval(form.replace("(", f"({arguments}", 1), vars(codecs))
        assert isinstance(made, codecs.Codec)


@pytest.mark.parametrize("page", SYSTEM_PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_the_verdicts_of_the_code(page: Path) -> None:
    assert subjects(page)
    text = page.read_text("utf-8")
    assert text == filled(text), "run python tests/docs/verdict_pages.py"


def test_a_verdict_stands_at_the_top_of_one_page_only() -> None:
    assert max(Counter(name for page in SYSTEM_PAGES for name in subjects(page)).values()) == 1


def test_the_page_of_all_verdicts_is_the_codes() -> None:
    assert TABLES.read_text("utf-8") == tables(), "run python tests/docs/verdict_pages.py"
