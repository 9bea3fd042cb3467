"""The site's pages before a builder reads them: all are there, once, and what is generated says what the code says."""

from __future__ import annotations

import dataclasses
import doctest
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import figures
import generate
import pytest
import reference
import roles
import yaml
from roles import linked

import fedcomp as fc
from fedcomp.experiments.program import COMMANDS
from fedcomp.rules import rules_of
from fedcomp.verdicts import VERDICTS, verdict_of

pytestmark = pytest.mark.slow

SHOWN = {
    "fedcomp.codecs.topk.TopK": "fedcomp.TopK",
    "fedcomp.codecs.TopK": "fedcomp.TopK",
    "fedcomp.TopK": "fedcomp.TopK",
}


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return generate.generated()


def nav() -> list[str]:
    def leaves(node: Any) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for child in node.values() if isinstance(node, dict) else node:
                yield from leaves(child)

    return list(leaves(yaml.safe_load((generate.ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]))


def test_every_page_is_in_the_navigation_and_every_entry_of_it_is_a_page(written: dict[str, str]) -> None:
    listed = nav()
    assert max(Counter(listed).values()) == 1
    assert set(listed) == {*generate.sources().values(), *written}
    assert all((generate.ROOT / name).is_file() for name in generate.sources())


def test_every_public_name_is_on_one_page_of_the_reference(written: dict[str, str]) -> None:
    entries = Counter(re.findall(r"^::: (\S+)$", "\n".join(written.values()), re.MULTILINE))
    assert max(entries.values()) == 1
    assert {f"fedcomp.{name}" for name in fc.__all__ if name != "__version__"} <= set(entries)


def test_every_module_is_listed_with_its_first_sentence(written: dict[str, str]) -> None:
    listed = re.findall(r"^\| `(\w+)` \| (.+) \|$", written["reference/modules.md"], re.MULTILINE)
    files = [path for folder in reference.FOLDERS for path in (generate.ROOT / folder).rglob("*.py")]
    assert Counter(name for name, _ in listed) == Counter(path.stem for path in files if path.stem != "__init__")
    assert [name for name, sentence in listed if not sentence.endswith((".", ".)", "?"))] == []


def test_a_module_without_a_docstring_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "coding").mkdir()
    (tmp_path / "coding" / "told.py").write_text('"""It adds (A et al. 2020). And more."""\n')
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert reference.sentences() == {"fedcomp.coding": {"told": "It adds (A et al. 2020)."}}
    (tmp_path / "coding" / "bare.py").write_text("x = 1\n")
    with pytest.raises(LookupError, match=r"without a docstring: coding/bare\.py$"):
        reference.sentences()


def test_names_that_cannot_be_shown_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fc._PLACES, "TopK", "fedcomp.elsewhere")
    with pytest.raises(LookupError, match=r"fedcomp\.elsewhere is on no page"):
        reference.entries()
    monkeypatch.undo()
    monkeypatch.setattr(fc.TopK, "__doc__", None)
    with pytest.raises(LookupError, match=r"without a docstring: fedcomp\.TopK$"):
        reference.entries()
    monkeypatch.undo()
    monkeypatch.setitem(reference.AREAS, "wire", reference.Area("Frames", "", (), ("fedcomp.wire.decode",)))
    with pytest.raises(LookupError, match=r"write module\.name: fedcomp\.wire\.decode$"):
        reference.entries()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see :class:`~fedcomp.codecs.topk.TopK`.", "see [`TopK`][fedcomp.TopK]."),
        (":meth:`fedcomp.codecs.TopK.encode`", "[`fedcomp.codecs.TopK.encode`][fedcomp.TopK]"),
        (":class:`TopK` raises :exc:`ValueError`", "[`TopK`][fedcomp.TopK] raises `ValueError`"),
        (":func:`~fedcomp.heap.\n    trim`", "`trim`"),
        ("``:not:`a role```", "``:not:`a role```"),
    ],
)
def test_roles_become_links_to_what_the_reference_shows_and_else_code(text: str, expected: str) -> None:
    assert linked(text, SHOWN, module="fedcomp.codecs.topk") == expected


def test_the_examples_of_roles_run() -> None:
    done = doctest.testmod(roles)
    assert done.attempted > 2
    assert done.failed == 0


def test_a_class_does_not_link_to_itself() -> None:
    where = {"module": "fedcomp.codecs.topk", "owner": "fedcomp.codecs.topk.TopK"}
    assert linked(":meth:`encode` of :class:`TopK`", SHOWN, **where) == "`encode` of `TopK`"


def test_no_role_is_left_in_what_is_shown() -> None:
    texts = reference.prepared(reference.entries())
    assert len(texts) > 250
    assert not [name for name, text in texts.items() if re.search(r":[a-z]+:`", text)]


def test_verdicts_stand_on_top_of_the_docstrings() -> None:
    texts = reference.prepared(reference.entries())
    topk = texts["fedcomp.codecs.topk.TopK"]
    assert topk.split("\n\n")[1] == f'!!! recommended "TopK: recommended"\n    {verdict_of("topk").reason}'
    assert verdict_of('TopK(values="q4")').reason in topk
    every = "\n".join(texts.values())
    missing = {key for key, verdict in VERDICTS["Codecs"].items() if f"    {verdict.reason}" not in every}
    assert missing == {"efsignsgd"}  # a row of experiments, whose codec has a verdict of its own


@pytest.mark.parametrize("codec", [fc.TopK, fc.EDEN, fc.ErrorFeedback])
def test_options_tables_have_every_field_its_rule_and_its_default(codec: type, written: dict[str, str]) -> None:
    table = written["options/codecs.md"].partition(f"\n## {codec.__name__}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.+) \|$", table, re.MULTILINE)
    fields = {field.name: field for field in dataclasses.fields(codec) if field.init}
    assert [name for name, *_ in rows] == list(fields)
    for name, may_be, default, meaning in rows:
        if name in rules_of(codec):
            assert may_be.replace("\\|", "|") == str(rules_of(codec)[name])
        missing = fields[name].default is dataclasses.MISSING
        assert default == ("required" if missing else f"`{fields[name].default!r}`")
        assert meaning.strip()


def test_the_command_line_has_every_command_and_its_options(written: dict[str, str]) -> None:
    text = written["reference/commands.md"]
    assert [name for name in COMMANDS if f"\n## fedcomp {name}\n" not in text] == ["edge"]
    for option in ("--list", "--give-up S", "--add-nodes N", "--listen HOST:PORT"):
        assert option in text
    assert "\x1b" not in text


def test_links_lead_to_the_place_on_the_site() -> None:
    places = generate.sources()
    for page, link, expected in (
        ("README.md", "[a](docs/reference/messages.md#which-flower)", "[a](reference/messages.md#which-flower)"),
        ("README.md", "[a](examples/quickstart_pytorch)", "[a](examples/quickstart_pytorch.md)"),
        ("docs/systems/eden.md", "[a](../README.md)", "[a](../pages.md)"),
        ("docs/background/codecs.md", "[a](../../CONTRIBUTING.md#add-a-codec)", "[a](../contributing.md#add-a-codec)"),
        ("docs/background/codecs.md", "[The C](../../setup.py) and [b](#b)", "The C and [b](#b)"),
        ("CONTRIBUTING.md", "[fedcomp/rules.py](fedcomp/rules.py)", "`fedcomp/rules.py`"),
        ("docs/background/codecs.md", "[a](missing.md)", "[a](missing.md)"),
        ("docs/background/codecs.md", "[a](https://flower.ai)", "[a](https://flower.ai)"),
    ):
        assert generate.fitted(link, page, places) == expected


def test_a_picture_of_the_first_page_becomes_an_image_for_each_theme() -> None:
    places = generate.sources()
    text = generate.fitted((generate.ROOT / "README.md").read_text("utf-8"), "README.md", places)
    assert "<picture>" not in text
    assert "](figures/bytes-accuracy-light.svg#only-light)\n![" in text
    picture = '<picture>\n<source srcset="../figures/a-dark.svg">\n<img alt="x" src="../figures/a-light.svg"></picture>'
    expected = "![x](../figures/a-light.svg#only-light)\n![x](../figures/a-dark.svg#only-dark)"
    assert generate.fitted(picture, "docs/systems/eden.md", places) == expected


def test_a_fence_says_its_language_alone() -> None:
    assert generate.fitted("```python fragment\nx\n```\n", "docs/background/codecs.md", {}) == "```python\nx\n```\n"


@pytest.mark.parametrize("path", sorted((generate.ROOT / "docs" / "figures").glob("*")), ids=lambda path: path.name)
def test_figures_are_those_that_the_script_draws(path: Path) -> None:
    assert path.read_text("utf-8") == figures.drawn()[path.name], "run python docs/site/figures.py"


def test_every_figure_is_there_in_both_themes_and_on_a_page() -> None:
    names = set(figures.drawn())
    assert names == {path.name for path in (generate.ROOT / "docs" / "figures").iterdir()}
    places = generate.sources()
    pages = "\n".join(generate.fitted((generate.ROOT / name).read_text("utf-8"), name, places) for name in places)
    assert {f"{name}#only-{name.partition('.')[0].rpartition('-')[2]}" for name in names} == set(
        re.findall(r"figures/([\w-]+\.svg#only-\w+)", pages)
    )


def test_what_figures_name_is_public_and_on_the_page_that_they_draw() -> None:
    page = (generate.ROOT / "docs" / "choose" / "use-this-when.md").read_text("utf-8")
    named = set(re.findall(r"fc\.\w+", figures.tree("light")))
    assert len(named) > 7
    assert {name.removeprefix("fc.") for name in named} <= set(fc.__all__)
    assert {name for name in named if name not in page} == set()
