"""Every block of Python on the pages runs, a page from top to bottom in one namespace, as a reader types it.

Blocks are fenced as ``python``, fed to ``python -`` in a ``console`` block, or indented and begin with an import. One
that needs a reader's own program is a fragment: its fence says ``python fragment``, and it has to compile.

Sizes that take long are made tiny by :data:`SMALLER`: text of the page and what stands in its place while it is tested.
What a block prints is not compared, but that it raises nothing is.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from page_reading import PAGES, ROOT, Block, blocks, name

from fedcomp.codecs.registry import codecs

SMALLER: dict[str, tuple[tuple[str, str], ...]] = {
    "docs/background/error-feedback.md": (("range(1, 2001)", "(500, 2000)"),),
    "docs/reference/engines.md": (("rounds=10, clients=10", "rounds=1, clients=2"),),
    "docs/how-to/no-server.md": (("    400,\n", "    10,\n"), ("num_rounds=100", "num_rounds=3")),
    "docs/how-to/record-privacy.md": (("rounds=10, clients=5", "rounds=1, clients=2"),),
    "docs/systems/dp-fedavg.md": (
        ("for seed in (0, 1)", "for seed in (0,)"),
        ("rounds=12, clients=50", "rounds=1, clients=4"),
    ),
    "docs/systems/eden.md": (("range(16)", "range(1)"),),
    "docs/tutorials/first-app.md": (
        ("rounds=10, fault=None", "rounds=1, fault=None"),
        ("rounds=30)", "rounds=1)"),
        ("rounds=3)", "rounds=1)"),
        ("rounds=30, fault", "rounds=1, fault"),
    ),
    "docs/systems/gossip-exact.md": (("zeros, 400, layout", "zeros, 10, layout"),),
    "docs/systems/gossip-undirected.md": (("start, 300, layout", "start, 10, layout"),),
    "docs/systems/push-sum.md": (("starts, 800, layout", "starts, 10, layout"),),
    "docs/systems/record-dp.md": (
        ("rounds=10, clients=5", "rounds=1, clients=2"),
        ("steps = 0.1, 60", "steps = 0.1, 3"),
    ),
}
"""By page: what takes long, and what is run in its place."""

FRAGMENT = "python fragment"


def source(block: Block) -> str | None:
    """Return the Python of a block, None where it is something else."""
    if block.info == "python":
        return block.text
    if block.info == "console" and "python - <<'EOF'\n" in block.text:
        return block.text.partition("<<'EOF'\n")[2].partition("\nEOF\n")[0]
    if block.info is None and re.match(r"from [\w.]+ import |import \w", block.text):
        return block.text
    return None


def programs(path: Path) -> list[tuple[Block, str]]:
    return [(block, text) for block in blocks(path) if (text := source(block)) is not None]


WITH_PYTHON = [path for path in PAGES if programs(path)]


@pytest.mark.long
@pytest.mark.parametrize("path", WITH_PYTHON, ids=name)
def test_e1_the_python_of_a_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDCOMP_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    # The codec that a page writes and registers is known on that page alone, not to the tests that follow.
    monkeypatch.setattr(codecs, "_classes", dict(codecs._classes))
    smaller = dict(SMALLER.get(name(path), ()))
    namespace = {"__name__": "page"}
    for block, text in programs(path):
        for long in [long for long in smaller if long in text]:
            text = text.replace(long, smaller[long])
        # The lines of the page, so that an error names them.
        padded = "\n" * (block.line - (block.info is None)) + text
        exec(compile(padded, str(path), "exec", dont_inherit=True), namespace)


def test_e1_what_is_made_smaller_stands_on_the_page() -> None:
    for page, pairs in SMALLER.items():
        text = "\n".join(text for _, text in programs(ROOT / page))
        assert [long for long, _ in pairs if long not in text] == []


def test_e1_every_fence_is_run_compiled_or_no_python() -> None:
    found = [block for path in PAGES for block in blocks(path) if block.info is not None]
    assert {block.info for block in found} <= {"", "sh", "text", "console", "diff", "python", FRAGMENT}
    for block in found:
        if block.info == FRAGMENT:
            ast.parse(block.text)
