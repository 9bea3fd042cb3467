"""The experiment on modular sums: what is compared is what was sent, and a model that differs is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from noted_settings import Read

from fedcomp.experiments import engines
from fedcomp.experiments.catalog import modular_sum
from fedcomp.experiments.experiment import Config
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.spec import RunResult

SMALL = ("task.hidden=32", "max_steps=1", "seeds=1", "values=4000", "trees=2", "uses=2", "senders=3")


@pytest.fixture(scope="module")
def run() -> tuple[Config, dict[str, RunResult], Findings]:
    """All rows for two rounds of a small model."""
    config = modular_sum.EXPERIMENT.configure(rounds=2, assignments=SMALL)
    results = {spec.label: engines.run(spec) for spec in modular_sum.EXPERIMENT.specs(config)}
    noted = Read(config.settings)
    found = modular_sum.measure(replace(config, settings=noted), results, Say())
    rows = {key for spec in modular_sum.EXPERIMENT.specs(config) for key in spec.settings}
    assert noted.read | rows >= set(config.settings), "a setting that nothing reads"
    return config, results, found


@pytest.mark.long
def test_two_vectors_reach_the_server_whatever_is_below(run) -> None:
    _, results, _ = run
    few, some, many = (modular_sum.received(n, results) for n in modular_sum.TREES)
    values = sum(array.size for array in results[modular_sum.along(8)].arrays.values())
    for found in (few, some, many):
        assert found.missing == 0
        assert found.vectors == pytest.approx(2 * (12 + values * found.bits / 8), abs=2)
        # K shards of each sum, and their headers.
        assert found.vectors + found.members < found.payload < found.vectors + found.members + 2 * 2 * 200
        assert found.uploads == pytest.approx(found.clients * values, rel=0.05)
    assert many.members == pytest.approx(4 * few.members, rel=0.02)
    assert many.uploads == pytest.approx(4 * few.uploads)
    assert many.wire > few.wire


@pytest.mark.long
def test_claims_hold_but_for_those_about_the_size(run) -> None:
    failed = {claim.name for claim in run[2].claims if claim.gate and not claim.ok}
    # A vector of 2400 values is little longer than the entries of 32 clients.
    assert failed <= {name for name in failed if "all payload" in name or "error" in name or "accuracy" in name}
    assert sum("values of the model that differ" in claim.name for claim in run[2].claims) == 4


@pytest.mark.long
def test_one_bit_of_a_model_and_a_longer_sum_are_noticed(run) -> None:
    config, results, _ = run
    label = modular_sum.along(32)
    name, array = next(iter(results[label].arrays.items()))
    changed = array.copy()
    changed.reshape(-1)[7] = np.nextafter(changed.reshape(-1)[7], np.float32(9))
    other = replace(results[label], arrays={**results[label].arrays, name: changed})
    assert modular_sum.different(results[label], results[label]) == 0
    assert modular_sum.different(results[label], other) == 1
    longer = [
        replace(record, metrics={**record.metrics, "coded.sum_bytes": {"vectors": 10**6, "members": 1}})
        if record.round
        else record
        for record in other.rounds
    ]
    lied = {**results, label: replace(other, rounds=longer)}
    trees = modular_sum.Records(modular_sum.received(n, lied) for n in modular_sum.TREES)
    count = {"tree": modular_sum.different(other, results[label])}
    failed = {claim.name for claim in modular_sum.tree_claims(config, trees, count) if not claim.ok}
    assert {"values of the model that differ: tree", "bits of a value in a sum, largest"} <= failed
    assert any("vectors with 32 clients over those with 8" in name for name in failed)
