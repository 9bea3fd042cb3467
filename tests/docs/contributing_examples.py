"""A plugin of pytest that registers what CONTRIBUTING.md adds, before any test is collected.

Run with ``-p contributing_examples``: the blocks of the page become a module, and its codec, gossip algorithm, systems
and experiment stand in the lists that the tests of their kind iterate over, as the lines that the page names would put
them.
"""

from __future__ import annotations

import sys
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
from page_reading import ROOT, blocks

ADDED = {"AboveMean", "halfway", "median-clip", "damped", "mine"}
"""How the tests of their kind call the five."""


def page() -> ModuleType:
    """Return the page's blocks of Python, run from top to bottom, as a module."""
    module = ModuleType("contributing_page")
    sys.modules[module.__name__] = module
    for block in blocks(ROOT / "CONTRIBUTING.md"):
        if block.info == "python":
            exec(compile("\n" * block.line + block.text, "CONTRIBUTING.md", "exec", dont_inherit=True), vars(module))
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Register all five; later than this the folder of the codecs' tests has read their list of examples."""
    sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("codecs", "systems")]
    import codec_examples
    import registry

    from fedcomp import codecs
    from fedcomp import systems as programs
    from fedcomp.experiments import systems
    from fedcomp.experiments.catalog import CATALOG
    from fedcomp.gossip import ALGORITHMS

    added: Any = page()
    codecs.AboveMean = added.AboveMean  # type: ignore[attr-defined]
    codec_examples.EXAMPLES = (*codec_examples.EXAMPLES, added.AboveMean(factor=1.5))
    sys.modules[f"fedcomp.systems.{added.__name__}"] = added
    programs.SYSTEMS = MappingProxyType({**programs.SYSTEMS, "median-clip": f"{added.__name__}:MedianClip"})  # type: ignore[misc]
    entry = registry.Entry(added.MedianClip(codecs.QSGD(levels=127)), exchanges=2, frozen=None)
    registry.ENTRIES = {**registry.ENTRIES, "median-clip": entry}  # type: ignore[misc]
    ALGORITHMS["halfway"] = f"{added.__name__}:Halfway"  # type: ignore[index]
    systems.SYSTEMS = MappingProxyType({**systems.SYSTEMS, "damped": added.SYSTEM})  # type: ignore[misc]
    CATALOG["mine"] = added.__name__
