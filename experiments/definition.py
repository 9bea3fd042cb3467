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
_HERE: Final = Path(fedcomp.experiments.__file__).parent


def definition(experiment: Experiment) -> str:
    """Return a digest of an experiment's module and its studies, without texts for readers; empty for one that is not
    in the catalogue."""
    if experiment.name not in CATALOG:
        return ""
    names = [f"catalog/{CATALOG[experiment.name].rpartition('.')[2]}.py"]
    tree = ast.parse((_HERE / names[0]).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedcomp.experiments.studies."):
            names.append(f"studies/{(node.module or '').rpartition('.')[2]}.py")
    return digest_of([(_HERE / name).read_text("utf-8") for name in names])


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
