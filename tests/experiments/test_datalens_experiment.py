"""The experiment on DataLens: budgets are those of the rows' rounds, figures of the published code are its own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fedcomp.experiments import engines
from fedcomp.experiments.catalog.datalens import EXPERIMENT
from fedcomp.experiments.findings import Findings, Pictures, Say
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.studies import datalens
from fedcomp.experiments.tables import findings, specs_of
from fedcomp.privacy.accounting import releases_for
from fedcomp.privacy.votes import entropy_bits


@pytest.fixture(scope="module")
def run() -> tuple[Config, dict[str, RunResult], Findings]:
    config = EXPERIMENT.configure(quick=True)
    # What a generator is worth has tests of its own.
    quick = {"task.synthetic": 100, "task.classifier_epochs": 1}
    specs = [replace(spec, settings={**spec.settings, **quick}) for spec in specs_of(EXPERIMENT, config)]
    results = {spec.label: engines.run(spec) for spec in specs}
    return config, results, findings(EXPERIMENT, config, results, Say())


@pytest.mark.long
def test_no_budget_is_crossed_and_one_row_ends_where_its_budget_does(run) -> None:
    config, results, found = run
    assert [claim.name for claim in found.claims if not claim.ok and "accuracy" not in claim.name] == []
    full, early = (results[datalens.variations(config)[i]] for i in (0, 2))
    assert full.final.round == 4
    # The noise is as large as four rounds need, and not larger.
    z = full.spec.settings["noise_multiplier"]
    assert releases_for(10.0, 1e-5, z) == 8
    assert releases_for(10.0, 1e-5, z / 1.01) < 8
    assert early.final.round == releases_for(5.0, 1e-5, z) // 2 == 1
    assert early.notes["privacy"]["epsilon"] <= 5.0
    assert not math.isnan(early.final.accuracy)
    over, unpaid, steps = range(3)

    def spent(rows: dict[str, RunResult], stopped: RunResult) -> list[float]:
        return list(datalens.spending(rows, stopped).values())

    for which, name, value in ((over, "epsilon", 10.1), (unpaid, "releases", 7)):
        forged = {**results, full.spec.label: replace(full, notes={"privacy": {**full.notes["privacy"], name: value}})}
        assert spent(forged, early)[which] > (1.0 if which == over else 0.0)
    assert spent(results, full)[steps] == 0
    assert spent(results, replace(early, rounds=full.rounds))[steps] == 3


def test_tables_hold_what_was_sent(run) -> None:
    config, results, found = run
    sent = next(table for table in found.tables if table.title.startswith("Bytes"))
    down = {row[0]: row[4] for row in sent.rows}
    assert down["images"] == 4 * 2 * 64
    assert down["generator"] > 12_224 * 4
    result = results[datalens.variations(config)[0]]
    assert sent.rows[0][1] == round(result.uplink_payload_bytes / (4 * 2))
    assert sent.rows[0][2] == round(entropy_bits(64, 32, 20) / 8)
    pictures = [figure for figure in found.figures if isinstance(figure, Pictures)]
    assert [picture.shape for picture in pictures] == [(10, 10, 8, 8)] * 3
    assert len({picture.pixels for picture in pictures}) == 3
    assert Findings.from_json(found.to_json()) == found


def test_1_11_e_the_published_settings_cost_what_was_measured_of_them(run) -> None:
    """Steps by their own rule; then that rule, Opacus' RDP and PRV, and the exact curve."""
    table = next(table for table in run[2].tables if table.title.startswith("What the published settings cost"))
    wanted = [
        (86, 0.9957, 0.8081, 0.7482, 0.7381),
        (86, 0.9957, 0.8081, 0.7482, 0.7381),
        (44, 0.9930, 0.8058, 0.7461, 0.7360),
        (60, 0.9982, 0.8102, 0.7502, 0.7401),
        (109, 9.9689, 9.1281, 8.5067, 8.4963),
        (146, 9.9696, 9.1288, 8.5073, 8.4969),
        (27, 9.7887, 8.9659, 8.3542, 8.3438),
        (25, 9.9601, 9.1201, 8.4993, 8.4889),
    ]
    for row, (steps, *costs) in zip(table.rows, wanted, strict=True):
        assert row[4] == steps
        assert row[5:9] == pytest.approx(costs, abs=1e-3)


def test_what_passes_the_threshold_is_mostly_noise_at_epsilon_1(run) -> None:
    table = next(table for table in run[2].tables if table.title.startswith("What the published settings cost"))
    noise, votes = ([row[i] for row in table.rows] for i in (10, 11))
    assert (min(noise[:4]), max(noise[:4])) == pytest.approx((0.42, 0.58), abs=0.005)
    assert (min(votes[:4]), max(votes[:4])) == pytest.approx((0.53, 0.60), abs=0.006)
    assert (min(noise[4:]), max(noise[4:])) == pytest.approx((0.15, 0.32), abs=0.005)
    assert min(votes[4:]) > 0.99
    dealt = next(table for table in run[2].tables if table.title == "Records with two teachers")
    assert dealt.rows[0][1:4] == (60000, 1138, 1138)
    assert dealt.rows[0][4:] == pytest.approx((1.58, 20.4), abs=0.02)
    assert dealt.rows[1][1:4] == (100, 0, 0)
