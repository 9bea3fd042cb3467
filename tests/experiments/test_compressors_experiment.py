"""The experiment ``compressors``: no codec is missing, settings keep their budgets, and nothing sees the test split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import fedcomp.experiments.studies.compressors as module
from fedcomp.codecs import get_codec, known
from fedcomp.experiments import central, engines
from fedcomp.experiments.catalog.compressors import EXPERIMENT
from fedcomp.experiments.central import Beside, beside
from fedcomp.experiments.findings import Say, Table
from fedcomp.experiments.kit import Record
from fedcomp.experiments.studies.compressors import (
    BLOCKS,
    BUDGETS,
    CHECKED,
    DEFAULT_BUDGETS,
    ELSEWHERE,
    FEDAVG,
    MODELS,
    OWN,
    POWER,
    REACH,
    ROWS,
    TOPK,
    cells,
    fit,
    front,
    plan_of,
    step_size,
    system_for,
    task_of,
    train,
    tune,
)
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.experiments.tables import findings as measure
from fedcomp.experiments.tables import specs_of

RANDOM = "random-k + EF"
NATURAL = "natural compression"
THRESHOLD = "threshold + EF"


def config(*assignments: str, **sizes: Any) -> Any:
    sizes = {"rounds": 1, "clients": 2, **sizes}
    return EXPERIMENT.configure(assignments=("seeds=2", "workers=1", "models=MLP", *assignments), **sizes)


def ids(found: Any) -> Iterator[str]:
    """Yield the ids of a configuration, nested ones as well."""
    if isinstance(found, Mapping):
        yield from ([str(found["id"])] if "id" in found else [])
        for value in found.values():
            yield from ids(value)


def in_the_table() -> set[str]:
    return {name for row in ROWS.values() for name in ids(row.codec(row.settings[0], 0.1))}


def test_every_codec_of_the_registry_is_in_the_table_or_has_a_reason() -> None:
    """Whoever adds a codec adds a row, or says why there is none."""
    rows = in_the_table()
    missing = set(known()) - rows - set(ELSEWHERE)
    assert not missing, f"no row for {sorted(missing)}: add one to ROWS of the experiment 'compressors'"
    assert not rows & set(ELSEWHERE)
    assert set(ELSEWHERE) <= set(known())
    assert {"rotation", "dct"} <= rows


def test_every_system_that_averages_with_a_codec_is_in_the_table() -> None:
    for system in SYSTEMS.values():
        settings = system.resolve({})
        if system.private or "topology" in system.needs or "task" in system.needs:
            continue
        strategy = system.build(settings, 0)
        # Coded rounds and their like say how frames travel, with the codecs of the others.
        codec = getattr(strategy, "codec", None)
        if codec is not None:
            assert set(ids(codec.to_config())) - {"feedback"} <= in_the_table() | set(ELSEWHERE), system.name


def test_every_setting_makes_a_codec_of_its_own() -> None:
    for label, row in ROWS.items():
        made = [repr(get_codec(row.codec(setting, 0.1))) for setting in (row.settings[0], row.settings[-1])]
        assert len(set(made)) == min(2, len(row.settings)), label
        assert len(set(row.settings)) == len(row.settings)


@pytest.mark.long
@pytest.mark.parametrize("row", [TOPK, BLOCKS, POWER, THRESHOLD, "ScaleCom", "AdaComp"])
def test_settings_are_the_largest_that_keep_the_budgets(row: str) -> None:
    """Frames decide, not formulas: the next setting would not keep the budget."""
    asked = config()
    found, settings = fit("MLP", row, config=asked), ROWS[row].settings
    rounds, lr = module.captured("MLP", asked.clients, asked.rounds, asked.seed), MODELS["MLP"].lr
    dense, _ = module.exchanged(system_for(FEDAVG, "", lr), rounds, asked.seed)
    for budget in BUDGETS:
        limit = float(Fraction(budget))
        if found[budget] is None:
            assert found["least"][1] > limit
            continue
        setting, share = found[budget]
        assert share <= limit
        place = settings.index(setting)
        if place + 1 < len(settings):
            more, _ = module.exchanged(system_for(row, settings[place + 1], lr), rounds, asked.seed)
            assert more / dense > limit


def fitted(row: str, least: float, **shares: Any) -> Record:
    at = {budget: shares.get(f"b{budget[2:]}") for budget in BUDGETS}
    return Record({"model": "MLP", "row": row, "least": ("small", least), **at})


def test_a_setting_stands_at_the_smallest_budget_that_it_keeps_and_no_row_is_without_a_cell() -> None:
    fits = [
        fitted("knob", 0.001, b100=(1, 0.01), b24=(2, 0.04), b13=(3, 0.07), b7=(4, 0.14)),
        fitted("coarse", 0.005, b100=(1, 0.009), b24=(1, 0.009), b13=(1, 0.009), b7=(2, 0.1)),
        fitted("large", 0.1, b7=("small", 0.1)),
        fitted("larger", 0.5),
    ]
    made = cells(fits, DEFAULT_BUDGETS)
    assert [(c["row"], c["budget"], c["setting"]) for c in made] == [
        ("knob", "1/100", 1),
        ("knob", "1/24", 2),
        ("coarse", "1/100", 1),
        ("large", "1/7", "small"),
        ("larger", OWN, "small"),
    ]
    assert [c["budget"] for c in cells(fits, BUDGETS)] == [*BUDGETS, "1/100", "1/7", "1/7", OWN]


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_chosen_on_the_test_split(model: str) -> None:
    tuning, judged = task_of(model, tuning=True), task_of(model)
    rows = {x.tobytes() + y.tobytes() for x, y in zip(judged.train_split.x, judged.train_split.y, strict=True)}
    for split in (tuning.train_split, tuning.test):
        assert all(x.tobytes() + y.tobytes() in rows for x, y in zip(split.x, split.y, strict=True))
    assert len(tuning.train_split) + len(tuning.test) == len(judged.train_split)
    chosen, shown = (plan_of(model, 0.1, 0, config(), tuning=tuning) for tuning in (True, False))
    assert chosen.task is tuning
    assert shown.task is judged
    assert chosen.seed != shown.seed
    assert chosen.held_out
    assert shown.held_out


def test_settings_and_times_are_measured_on_updates_of_the_tuning_task(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    whole = module.task_of
    monkeypatch.setattr(
        module, "task_of", lambda model, *, tuning=False: asked.append(tuning) or whole(model, tuning=True)
    )
    module.captured.cache_clear()
    found = module.captured("MLP", 2, 8, 0)
    module.captured.cache_clear()
    assert asked == [True]
    assert [len(updates) for updates in found] == [module.SENDERS] * module.LOOKED
    assert np.abs(found[0][0].vector - found[1][0].vector).max() > 0


def searched(monkeypatch: pytest.MonkeyPatch, loss: Any) -> tuple[dict[str, Any], list[float]]:
    tried: list[float] = []

    def made(*args: Any, tuning: bool, config: Any) -> dict[str, Any]:
        assert tuning
        tried.append(args[4])
        return {"loss": loss(round(math.log(args[4] / MODELS["MLP"].lr, 3)))}

    monkeypatch.setattr(module, "train", made)
    return tune("MLP", TOPK, "1/24", 0.1, config=config()), tried


def test_step_sizes_are_searched_by_one_rule_beyond_an_end_that_does_best(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = searched(monkeypatch, lambda power: (power - 0.2) ** 2)
    assert (found["lr"], found["end"], len(tried)) == (step_size("MLP", 0), False, 3)
    found, tried = searched(monkeypatch, lambda power: (power + 2) ** 2)
    assert (found["lr"], found["end"]) == (step_size("MLP", -2), False)
    assert tried == [step_size("MLP", power) for power in (-1, 0, 1, -2, -3)]
    found, tried = searched(monkeypatch, lambda power: -power)
    assert (found["lr"], found["end"], len(tried)) == (step_size("MLP", REACH), True, 5)
    # What diverges is worse than anything else.
    found, _ = searched(monkeypatch, lambda power: math.inf if power > -2 else 1.0)
    assert found["lr"] == step_size("MLP", -2)
    assert [lr for lr, _ in found["tried"]] == sorted(lr for lr, _ in found["tried"])


def test_a_cell_is_reproducible_and_depends_on_its_seed() -> None:
    def made(seed: int) -> dict[str, Any]:
        return train("MLP", RANDOM, "1/24", 0.2, 0.3, seed, config=config())

    first = made(0)
    assert made(0) == first
    assert made(1)["loss"] != first["loss"]
    assert set(first) == {"loss", "accuracy", "uplink", "downlink"}


@pytest.mark.long
def test_what_is_run_with_messages_is_what_is_trained_without() -> None:
    asked = config()
    results = {spec.label: engines.run(spec) for spec in specs_of(EXPERIMENT, asked)}
    assert list(results) == ["fedavg, MLP", "topk, MLP", "power-sgd, MLP"]
    _, compared = beside(results, "")
    assert [each.model for each in compared.values()] == [0, 0, 0]
    assert [each.frames for each in compared.values()][1:] == [0, 0]


def test_the_front_is_what_nothing_beats_in_both() -> None:
    pairs = [(3.0, 1.0), (2.0, 2.0), (2.0, 1.5), (1.0, 9.0), (1.5, 9.5), (math.nan, 0.0)]
    found = front([Record({"loss": loss, "cost": cost}) for loss, cost in pairs], "cost")
    assert [(p.loss, p.cost) for p in found] == [(3.0, 1.0), (2.0, 1.5), (1.0, 9.0)]


FEW_ROWS = {name: ROWS[name] for name in (FEDAVG, TOPK, THRESHOLD, POWER, NATURAL)}


UPLINK = {FEDAVG: 340_000.0, TOPK: 14_000.0, THRESHOLD: 12_000.0, POWER: 13_000.0, NATURAL: 46_000.0}


def measured(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Mapping[str, Any]] = {}, **more: Any) -> Any:
    """Measure with made-up figures: every row has a setting for 1/24, and natural compression one for 1/7."""

    def made_fit(model: str, row: str, *, config: Any) -> dict[str, Any]:
        at = {FEDAVG: None, NATURAL: "1/7"}.get(row, "1/24")
        return {"least": ("x", UPLINK[row] / 340_000), **{b: ("x", 0.01) if b == at else None for b in BUDGETS}}

    def made(
        model: str, row: str, budget: str, setting: Any, lr: float, seed: int, *, config: Any, tuning: bool = False
    ) -> dict[str, Any]:
        sent = {"uplink": UPLINK[row], "downlink": 1.0}
        return {"loss": 1.0 + len(row) / 1000, "accuracy": 0.9, **sent, **changes.get(row, {})}

    monkeypatch.setattr(module, "ROWS", FEW_ROWS)
    monkeypatch.setattr(module, "fit", made_fit)
    monkeypatch.setattr(module, "train", more.get("train", made))
    monkeypatch.setattr(module, "tune", lambda *a, **o: {"lr": 0.1, "end": more.get("end", False), "tried": []})
    monkeypatch.setattr(module, "cost", lambda *a, **o: {"times": 2.0})
    beside_them = {system: Beside(more.get("differ", 0), 0, 0.0) for system in CHECKED}
    monkeypatch.setattr(central, "beside", lambda results, caption: (Table("checked", (), ()), beside_them))
    return measure(EXPERIMENT, config(), {}, more.get("say", Say()))


def failed(findings: Any, *, gate: bool) -> list[str]:
    return [claim.name for claim in findings.claims if claim.gate == gate and not claim.ok]


def test_claims_are_about_budgets_bits_and_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    good = measured(monkeypatch)
    assert not failed(good, gate=True)
    (over,) = failed(measured(monkeypatch, {POWER: {"uplink": 17_500.0}}), gate=True)
    assert over == "largest uplink over its budget, codecs whose setting decides the length"
    # The lengths of others are not theirs to choose: that is a goal.
    loose = measured(monkeypatch, {THRESHOLD: {"uplink": 25_000.0}})
    assert not failed(loose, gate=True)
    assert "largest uplink over its budget, codecs whose data decide the length" in failed(loose, gate=False)
    assert len(failed(measured(monkeypatch, differ=1), gate=True)) == 3
    calls = iter(range(1000))

    def drifting(row: str, **others: Any) -> dict[str, Any]:
        sent = {"uplink": UPLINK[row], "downlink": 1.0}
        return {"loss": 1.0 + next(calls), "accuracy": 0.9, **sent}

    assert failed(measured(monkeypatch, train=drifting), gate=True) == [
        "figures of a training that is made again that differ"
    ]


def test_goals_are_shown_as_missed_and_fail_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = failed(measured(monkeypatch), gate=False)
    # Nothing has a cell at a hundredth here.
    assert usual == [f"rows with less test loss than {TOPK} at 1/100 on every model"]
    worse = measured(monkeypatch, {POWER: {"loss": 1.2}})
    assert f"MLP: test loss of {POWER} at 1/24 over that of {TOPK}" in failed(worse, gate=False)
    assert not failed(worse, gate=True)
    assert "cells whose best step size is at an end of those tried" in failed(
        measured(monkeypatch, end=True), gate=False
    )
    lost = measured(monkeypatch, {NATURAL: {"loss": math.inf, "accuracy": math.nan, "uplink": math.nan}})
    assert "cells of which a training diverged" in failed(lost, gate=False)
    assert not failed(lost, gate=True)
    row = next(row for row in lost.tables[1].rows if row[0] == NATURAL)
    assert row[4] is None
    both = measured(monkeypatch, {row: {"loss": 1.5} for row in (POWER, TOPK, THRESHOLD)})
    over = "MLP: least test loss at 1/24 over FedAvg's, with momentum where that is less"
    assert over in failed(both, gate=False)


def test_the_tables_name_the_front_and_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = measured(monkeypatch, {POWER: {"loss": 0.5}})
    best, whole, fitted, _ = findings.tables
    assert best.rows[0][:6] == ("MLP, 1/24", 1.006, None, 1.014, 0.5, POWER)
    assert [row[0] for row in whole.rows] == [row[1] for row in fitted.rows] == list(FEW_ROWS)
    assert {row[0]: row[-1] for row in whole.rows if row[-1]} == {THRESHOLD: "bytes", POWER: "bytes, time"}
    assert fitted.rows[0][2:] == ("x: 1/1", "", "", "", "")
    assert {figure.title for figure in findings.figures} == {
        "MLP: test loss against uplink bytes",
        "MLP: test loss against time",
    }
    assert all(figure.series[0].name == "Pareto set" for figure in findings.figures)
    assert "MLP 0.50 at 1/24 (PowerSGD)" in findings.answer


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(monkeypatch: pytest.MonkeyPatch) -> None:
    whole: dict[str, Any] = {}
    findings = measured(monkeypatch, say=Say(keep=whole.__setitem__))
    kept: dict[str, Any] = {}
    count = iter(range(100))

    def dying(row: str, **others: Any) -> dict[str, Any]:
        if next(count) > 3:
            raise KeyboardInterrupt
        return {"loss": 1.0 + len(row) / 1000, "accuracy": 0.9, "uplink": UPLINK[row], "downlink": 1.0}

    with pytest.raises(KeyboardInterrupt):
        measured(monkeypatch, train=dying, say=Say(keep=kept.__setitem__))
    assert 0 < len(kept) < len(whole)
    before = dict(kept)
    resumed = measured(monkeypatch, say=Say(kept=kept, keep=kept.__setitem__))
    assert kept == whole
    assert all(kept[name] is before[name] for name in before)
    assert resumed.to_json() == findings.to_json()


def test_wrong_models_are_refused_with_the_nearest() -> None:
    from fedcomp.errors import ConfigError

    with pytest.raises(ConfigError, match="did you mean 'LSTM'"):
        config("models=MLP,LSTN")
