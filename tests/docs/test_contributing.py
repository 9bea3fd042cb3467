"""The five examples of CONTRIBUTING.md pass the tests of their kind, as what is added by the page has to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from contributing_examples import ADDED, page
from page_reading import ROOT

from fedcomp.codecs.registry import codecs
from fedcomp.experiments.run import RunnerSetup
from fedcomp.experiments.run import main as run_experiment

OF_THEIR_KIND = {
    "tests/codecs/test_codec_protocol.py": "AboveMean",
    "tests/gossip/test_every_algorithm.py": "halfway",
    "tests/systems/test_contract.py": "median-clip",
    "tests/strategies/test_system.py": "damped",
    "tests/experiments/test_systems.py": "damped",
    "tests/experiments/test_catalog.py": "mine",
}
"""Files of tests that iterate over all of a kind, and which example each takes."""


@pytest.mark.long
def test_the_examples_pass_the_tests_of_their_kind() -> None:
    """In a process of its own: what the page registers is known there alone."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("tests/docs", "tests"))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "contributing_examples", "-p", "no:cacheprovider"]
    command += [*OF_THEIR_KIND, "-k", " or ".join(sorted(ADDED))]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    passed = re.findall(r"^(tests/\S+?)::(.*) PASSED", done.stdout, re.M)
    assert {(file, name) for file, test in passed for name in ADDED if name in test} >= set(OF_THEIR_KIND.items())
    assert sum("halfway" in test for _, test in passed) >= 15
    assert sum("AboveMean" in test for _, test in passed) >= 5
    assert sum("median-clip" in test for _, test in passed) >= 25


def test_the_experiment_runs_at_its_smallest_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codecs, "_classes", dict(codecs._classes))
    setup = RunnerSetup(catalog={"mine": page().EXPERIMENT})
    assert run_experiment(["mine", "--quick", "--out", str(tmp_path)], setup=setup) == 0
    assert "top-k: times fewer up" in capsys.readouterr().out
