"""What importing a part, or listing what it has, does not bring along: each of these takes seconds to import."""

from __future__ import annotations

import subprocess
import sys

import pytest
from page_reading import ROOT

LIGHT = [
    ("import fedcomp.tasks, fedcomp.timing", ("torch", "sklearn", "flwr", "ray", "numba")),
    ("import fedcomp.clients.app", ("torch", "ray", "numba")),
    ("import fedcomp.experiments.engines", ("torch", "flwr", "ray")),
    ("from fedcomp.experiments.run import main; main(['--list'])", ("torch", "flwr", "ray", "numba", "matplotlib")),
    ("from fedcomp.experiments.bench.__main__ import main; main(['--list'])", ("torch", "flwr", "ray", "matplotlib")),
    # What torch imports to reason about shapes of meta tensors: half a second in every process of a client.
    ("from fedcomp.tasks import models as m; m.build(lambda: m.Mlp(4, (3,), 2), 0)", ("sympy",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "heavy"), LIGHT, ids=[statement for statement, _ in LIGHT])
def test_it_brings_nothing_heavy(statement: str, heavy: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    *said, found = done.stdout.splitlines()
    assert found == "[]"
    assert bool(said) == ("--list" in statement)
