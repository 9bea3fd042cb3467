"""The digest of an experiment's definition, by which stored results from an older definition are recognised."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import fedcomp.experiments
from fedcomp.experiments.catalog import CATALOG
from fedcomp.experiments.experiment import Experiment

_CLAIM: Final = re.compile(r"^\s*([^|\n]*\|[^|\n]*\|[^|\n]*\|\s*(?:gate|goal)):", re.MULTILINE)
"""A claim as it is written, up to its reason."""
_STUDIES: Final = "fedcomp.experiments.studies"
_HERE: Final = Path(fedcomp.experiments.__file__).parent


def definition(experiment: Experiment) -> str:
    """Return a digest of an experiment's module and its studies, without texts for readers; empty for one that is not
    in the catalogue."""
    if experiment.name not in CATALOG:
        return ""
    return digest_of(sources_of(f"catalog/{CATALOG[experiment.name].rpartition('.')[2]}.py"))


def sources_of(name: str, folder: Path = _HERE) -> list[str]:
    """Return the source of a module, by its path in ``folder``, and those of all studies that it imports, also through
    other studies."""
    names = [name]
    for each in names:
        for node in ast.walk(ast.parse((folder / each).read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(_STUDIES):
                continue
            # "from studies.fft import ..." or "from studies import fft, gcn".
            study = (node.module or "").removeprefix(_STUDIES).removeprefix(".")
            found = [study] if study else [alias.name for alias in node.names]
            names += [path for path in (f"studies/{one}.py" for one in found) if path not in names]
    return [(folder / each).read_text("utf-8") for each in names]


def digest_of(sources: Iterable[str]) -> str:
    """Return a digest of Python sources, the same whatever their comments, docstrings and texts for readers are."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(ast.dump(_Bare().visit(ast.parse(source))).encode())
    return digest.hexdigest()[:16]


class _Bare(ast.NodeTransformer):
    """Takes out what only a reader sees: docstrings, long texts, the reasons of claims, how long a run takes."""

    def visit_keyword(self, node: ast.keyword) -> ast.AST | None:
        return None if node.arg == "minutes" else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if text else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not isinstance(node.value, str):
            return node
        if claims := _CLAIM.findall(node.value):
            return ast.Constant(repr(claims))
        long = node.value.count(" ") > 6 and "=" not in node.value
        return ast.Constant("") if long else node
