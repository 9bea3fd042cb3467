"""Experiments as tables: what a row means, how rows are tuned and repeated, and what is asked of them by name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine

from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.errors import ConfigError
from fedcomp.experiments.experiment import Curve, Experiment, Studied, read_claims
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.kit import Records
from fedcomp.experiments.options import Option
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.tables import TUNING_SEED, Found, Training, findings, specs_of, without_messages
from fedcomp.rules import Flag
from fedcomp.systems.pair import Pair

BEST = {"dense": 0.1, "sparse": 0.3, "rival": 0.3}


def formula(spec: RunSpec, training: Training) -> Mapping[str, Any]:
    """Train nothing: a row does best at a step size of its own, and diverges at the largest."""
    lr, sent = float(spec.settings["lr"]), 1000.0 if spec.label == "dense" else 10.0
    score = 90.0 - 100 * abs(lr - BEST[spec.label]) + 2 * (spec.seed % TUNING_SEED)
    sizes = dict.fromkeys(("uplink", "downlink", "late", "wire_up", "wire_down", "peer"), sent * spec.clients)
    return {
        "score": math.inf if lr > 0.8 else score,
        "diverged": 2 if lr > 0.8 else None,
        "points": [[float(r), score + r, sent * r, 2 * sent * r, 3 * sent * r] for r in range(3)],
        "asked": [spec.settings["task.validation"], spec.seed],
        "accuracy": score,
        "loss": 0.5,
        "simulated": 1.0,
        "seconds": 2.0,
        **sizes,
    }


def table_of(**changed: Any) -> Experiment:
    """Return an experiment of two rows that are tuned and repeated."""
    given: dict[str, Any] = {
        "name": "levels",
        "question": "Does it?",
        "rounds": 4,
        "clients": 5,
        "task": "digits",
        "each": "epochs=1",
        "rows": {"dense": "fedavg", "sparse": "topk feedback=true codec.density={codec.density}"},
        "options": {"seeds": 2, "workers": 1, "steps": "0.1,0.3,0.9", "codec.density": 0.01, "task.partition": "iid"},
        "tune": {"lr": "steps"},
        "train": formula,
        "tunes_without_messages": False,
    }
    return Experiment(**given | changed)


def found_by(experiment: Experiment, *assignments: str, say: Say | None = None) -> tuple[Findings, Found]:
    """Return what an experiment finds, and what it found that by."""
    seen: list[Found] = []
    study = experiment.study

    def watched(found: Found) -> Studied:
        seen.append(found)
        return study(found) if study else Studied()

    experiment = Experiment(**{**vars(experiment), "study": watched})
    out = findings(experiment, experiment.configure(assignments=assignments), {}, say or Say())
    assert Findings.from_json(json.loads(json.dumps(out.to_json(), allow_nan=False))).to_json() == out.to_json()
    return out, seen[0]


def test_a_row_is_what_a_user_would_type_with_the_options_of_the_experiment() -> None:
    experiment = table_of(
        rows={
            "plain": "fedavg",
            "own": "topk codec.density={codec.density} lr=0.5 task=breast-cancer rounds=2 clients=3",
        },
        options={"lr": 0.1, "codec.density": 0.25, "task.hidden": "8", "batch_size": 32},
        tune={},
    )
    plain, own = specs_of(experiment, experiment.configure(seed=7, assignments=["codec.density=0.5"]))
    every = {"lr": 0.1, "task.hidden": "8", "batch_size": 32, "epochs": 1}
    assert plain == RunSpec("fedavg", "plain", "digits", "inprocess", 4, 5, 7, every)
    assert own == RunSpec(
        "topk", "own", "breast-cancer", "inprocess", 2, 3, 7, {**every, "lr": 0.5, "codec.density": 0.5}
    )


def test_a_row_takes_all_digits_of_an_option() -> None:
    experiment = table_of(
        rows={"sparse": "topk codec.density={codec.density}"}, tune={}, options={"codec.density": 0.1}
    )
    (spec,) = specs_of(experiment, experiment.configure(assignments=["codec.density=0.0123456789"]))
    assert spec.settings["codec.density"] == 0.0123456789


def test_rows_and_what_all_have_may_depend_on_the_options() -> None:
    experiment = table_of(
        rows=lambda config: {"dense": "fedavg", **({"sparse": "topk"} if config.settings["both"] else {})},
        each=lambda config: f"evaluate_every={config.rounds // 2}",
        options={"both": Option(True, Flag(), "whether there are two")},
        tune={},
    )
    both, one = experiment.configure(), experiment.configure(assignments=["both=false"])
    assert [spec.label for spec in specs_of(experiment, both)] == ["dense", "sparse"]
    (spec,) = specs_of(experiment, one)
    assert spec.settings == {"evaluate_every": 2}


def test_a_row_that_names_no_option_is_refused_with_the_nearest() -> None:
    experiment = table_of(rows={"dense": "topk codec.density={codec.densty}"}, tune={}, options={"codec.density": 0.1})
    with pytest.raises(ConfigError, match=r"row 'dense': no setting 'codec.densty'; did you mean 'codec.density'\?"):
        specs_of(experiment, experiment.configure())


def test_settings_are_chosen_on_other_data_and_draws_than_they_are_judged_by() -> None:
    _, found = found_by(table_of())
    assert found.chosen == {"dense": {"lr": 0.1}, "sparse": {"lr": 0.3}}, "what diverged is worth nothing"
    for row in found.rows:
        assert [each.asked for each in found.tried[row]] == [[True, TUNING_SEED]] * 3
        assert [each.asked for each in found.groups[row]] == [[False, 0], [False, 1]]


def test_two_settings_are_chosen_together() -> None:
    steps = table_of().options
    experiment = table_of(
        tune={"lr": "steps", "codec.density": "densities"}, options={**steps, "densities": steps["steps"]}
    )
    _, found = found_by(experiment, "densities=0.1,0.2", "seeds=1")
    assert found.chosen["sparse"] == {"lr": 0.3, "codec.density": 0.1}, "the first of those that do alike"
    assert len(found.tried["sparse"]) == 6


def test_what_is_not_tuned_may_be_repeated_and_has_no_validation_split() -> None:
    experiment = table_of(tune={}, options={"seeds": 3, "lr": 0.1})
    config = experiment.configure(seed=5)
    assert specs_of(experiment, config) == [], "the runner trains none"
    assert "task.validation" not in Training.of(experiment, config).spec("dense").settings


def test_quantities_are_means_over_seeds_and_compare_with_the_baseline_or_another_row() -> None:
    _, found = found_by(table_of())
    assert found.of("sparse", "step size") == 0.3
    assert found.of("sparse", "test, %") == pytest.approx(91.0)
    assert found.of("sparse", "±") == pytest.approx(1.0)
    assert found.of("sparse", "points lost") == pytest.approx(0.0)
    assert found.of("sparse", "uplink bytes") == 10.0 / 4, "per client and round"
    assert found.of("sparse", "last downlink bytes") == 10.0, "per client"
    assert found.of("sparse", "times fewer up") == 100.0
    assert found.of("dense", "times fewer both ways against sparse") == pytest.approx(0.01)
    assert found.of("sparse", "bits per weight") == pytest.approx(0.32)
    assert (found.of("dense", "simulated seconds"), found.of("dense", "seconds here")) == (1.0, 2.0)
    _, other = found_by(table_of(baseline="sparse"))
    assert other.of("dense", "times fewer up") == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("row", "quantity", "said"),
    [
        ("dense", "points lots", "no quantity 'points lots'; did you mean 'points lost'"),
        ("sparser", "points lost", "no row 'sparser'; did you mean 'sparse'"),
        ("dense", "points lost against sparser", "no row 'sparser'"),
        ("", "the fist", "the study found no 'the fist'; did you mean 'the first'"),
    ],
)
def test_what_nobody_measured_is_refused_with_the_nearest(row: str, quantity: str, said: str) -> None:
    study = {"study": lambda found: Studied({"the first": 1.0})}
    _, found = found_by(table_of(**study))
    for ask in (
        lambda: found.of(row, quantity),
        lambda: found_by(table_of(claims=f"{row} | {quantity} | <= 1 | goal: of a test", **study)),
        lambda: found_by(table_of(answer=f"It is {{{row} | {quantity}:.1f}}.", **study)),
    ):
        with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
            ask()


def test_claims_are_of_rows_and_of_the_study_and_skipped_where_that_says_why() -> None:
    experiment = table_of(
        claims="""
            # A comment.
            sparse | times fewer up     | >= 50 | gate: derived: of a thousand
                                                  ten are sent
            sparse | points lost        | <= -9 | goal: wishful
                   | kept, %            | == 3  | gate: of the study
            sparse | kept, %            | <= 1  | goal: of the study
                   | with another thing | <= 1  | gate: of another
        """,
        study=lambda found: Studied(
            {"kept, %": 3.0, ("sparse", "kept, %"): 2.0}, skipped={"with another thing": "install it"}
        ),
    )
    out, _ = found_by(experiment)
    told = [(each.name, each.ok, each.gate, each.source) for each in out.claims]
    assert told[:4] == [
        ("sparse: times fewer up", True, True, "derived: of a thousand ten are sent"),
        ("sparse: points lost", False, False, "wishful"),
        ("kept, %", True, True, "of the study"),
        ("sparse: kept, %", False, False, "of the study"),
    ]
    assert (out.claims[4].skipped, math.isnan(out.claims[4].value)) == ("install it", True)


def test_a_claim_of_a_number_that_there_is_not_fails() -> None:
    experiment = table_of(study=lambda found: Studied({"gap": None}), claims="| gap | <= 1 | gate: of a test")
    (claim,) = found_by(experiment)[0].claims
    assert not claim.ok


@pytest.mark.parametrize(
    "line",
    [
        "sparse | points lost | <= 1",
        "a line that goes on with nothing",
        "sparse | points lost | <= 1 | perhaps: a reason",
        "sparse | points lost | <= 1 | gate:",
        "sparse | points lost | <= 1 | gate",
        "sparse |  | <= 1 | gate: a reason",
        "sparse | points | lost | <= 1 | gate: a reason",
    ],
)
def test_a_line_that_is_no_claim_is_refused_where_it_is_written(line: str) -> None:
    with pytest.raises(ConfigError, match=r"expected 'row \| quantity \| bound \| gate or goal: reason'"):
        table_of(claims=line)
    with pytest.raises(ConfigError):
        read_claims(line)


def test_a_reason_of_several_lines_is_one_sentence() -> None:
    (line,) = read_claims("sparse | points lost | <= 1 | gate: theory,            of one\n        and  another\n")
    assert line.reason == "theory, of one and another"


def test_rows_and_quantities_that_are_joined_are_a_claim_each_with_one_bound_and_reason() -> None:
    found = read_claims("a & b, c | lost & sent | <= 1 | gate: one\n  reason & more\n| of all | < 2 | goal: another")
    assert [(line.row, line.quantity) for line in found] == [
        *(("a", "lost"), ("a", "sent"), ("b, c", "lost"), ("b, c", "sent")),
        ("", "of all"),
    ]
    assert {(line.bound, line.gate, line.reason) for line in found[:4]} == {("<= 1", True, "one reason & more")}


@pytest.mark.parametrize("bound", ["about 1", "<= one", "1"])
def test_a_bound_that_is_no_comparison_is_refused(bound: str) -> None:
    with pytest.raises(ConfigError, match="is not a comparison and a number"):
        found_by(table_of(claims=f"sparse | points lost | {bound} | gate: a reason"))


def test_the_table_has_the_quantities_and_functions_of_a_row_and_no_empty_column() -> None:
    columns = {
        "points": "points lost",
        "sent": "times fewer up",
        "kept": lambda found, row: found.config.settings["codec.density"] if row == "sparse" else None,
        "none": lambda found, row: None,
    }
    out, _ = found_by(table_of(columns=columns, title="What is sent"))
    (table,) = out.tables
    assert table.title == "What is sent"
    assert table.columns == ("row", "points", "sent", "kept")
    assert table.rows == (("dense", 0.0, 1.0, None), ("sparse", 0.0, 100.0, 0.01))
    for said in ("Means over seeds", "the last 5 rounds", "step size of the grid", "compare with dense"):
        assert said in table.caption
    (named,) = found_by(table_of(columns=("uplink bytes", "bits per weight"), caption="Mine."))[0].tables
    assert (named.columns[1:], named.rows[1][1:], named.caption) == (
        ("uplink bytes", "bits per weight"),
        (2, 0.32),
        "Mine.",
    )
    assert found_by(table_of())[0].tables == ()


def test_curves_are_means_over_seeds_of_the_rows_they_name() -> None:
    out, _ = found_by(table_of(curves=[Curve(rows=["sparse"]), Curve(x="round", title="By round")]))
    bytes_so_far, by_round = out.figures
    assert [line.name for line in bytes_so_far.series] == ["sparse"]
    assert bytes_so_far.series[0].x == (0.0, 10.0, 20.0)
    assert bytes_so_far.series[0].y == (91.0, 92.0, 93.0)
    assert (bytes_so_far.log_x, bytes_so_far.x_bytes) == (True, True)
    assert (by_round.title, by_round.log_x, len(by_round.series)) == ("By round", False, 2)
    with pytest.raises(ConfigError, match="curve of 'test accuracy, %': no row 'spars'; did you mean 'sparse'"):
        found_by(table_of(curves=[Curve(rows=["spars"])]))


def test_an_answer_is_filled_with_numbers() -> None:
    study = {"study": lambda found: Studied({"kept, %": 2.5})}
    out, _ = found_by(table_of(answer="{sparse | times fewer up:.0f} times, {kept, %:.1f} % kept", **study))
    assert out.answer == "100 times, 2.5 % kept"
    out, _ = found_by(table_of(answer=lambda found: f"{len(found.rows)} rows, {{dense | test, %:.1f}} %"))
    assert out.answer == "2 rows, 91.0 %"


def test_two_processes_find_what_one_does_and_a_resumed_run_trains_nothing() -> None:
    experiment = table_of(columns=("test, %", "±"), claims="sparse | points lost | <= 1.0 | goal: of a test")
    kept: dict[str, Any] = {}
    one, _ = found_by(experiment, say=Say(keep=kept.__setitem__))
    assert found_by(experiment, "workers=2")[0].to_json() == one.to_json()
    say = Say(kept=json.loads(json.dumps(kept)), keep=lambda name, cell: pytest.fail(f"{name} was trained again"))
    assert found_by(experiment, say=say)[0].to_json() == one.to_json()


def test_rows_of_the_runner_are_asked_alike() -> None:
    experiment = table_of(options={"codec.density": 0.01}, tune={}, columns=("times fewer up", "test, %"))
    config = experiment.configure()
    results = {spec.label: FakeEngine()(spec, on_round=None, checkpoint=None) for spec in specs_of(experiment, config)}
    out = findings(experiment, config, results, Say())
    # Accuracies of the fake engine: 0.1 and a tenth for each round, of which the last five of five are taken.
    assert out.tables[0].rows == (("dense", 1.0, 30.0), ("sparse", 100.0, 30.0))
    found = Found(experiment, config, results, Say())
    found.groups = dict.fromkeys(results, Records([]))
    assert found.of("sparse", "bytes of the model that differ") == 0
    results["sparse"].arrays["weight"][1] = np.nan
    assert found.of("sparse", "bytes of the model that differ") > 0


def fifth(density: float) -> Pair:
    return Pair(ErrorFeedback(TopK(density=density)))


def test_rows_train_alike_with_messages_and_without_and_so_does_a_rival_of_no_name() -> None:
    rows = {
        "dense": "fedavg",
        "sparse": "topk feedback=true codec.density=0.2",
        "rival": "fifth codec.density=0.2",
    }
    given = table_of(rows=rows, rivals={"fifth": fifth}, tune={}, options={"seeds": 1, "lr": 0.1, "task.hidden": "8"})
    sent_by = Experiment(**vars(given) | {"train": None, "rounds": 2, "clients": 2})
    _, sent = found_by(sent_by)
    _, simulated = found_by(Experiment(**vars(sent_by) | {"train": without_messages}))
    for row in rows:
        assert simulated.of(row, "test, %") == sent.of(row, "test, %")
    # Of whole models the messages carry Flower's arrays, with headers.
    assert simulated.of("dense", "uplink bytes") < sent.of("dense", "uplink bytes")
    assert simulated.of("sparse", "uplink bytes") == sent.of("sparse", "uplink bytes")
    assert sent.of("rival", "test, %") == sent.of("sparse", "test, %")
    assert sent.of("rival", "uplink bytes") == sent.of("sparse", "uplink bytes")
    assert math.isnan(sent.number("rival", "downlink bytes")), "only messages have one"
    assert sent.number("sparse", "downlink bytes") > sent.number("sparse", "uplink bytes")


def test_a_training_that_ended_early_is_not_said_to_have_sent_fewer_bytes() -> None:
    rows = {"dense": "fedavg lr=0.1", "wild": "fedavg lr=1e7"}
    given = table_of(
        rows=rows,
        tune={},
        options={"seeds": 1, "task.hidden": "4,4"},
        each="max_steps=1",
        train=without_messages,
        claims="wild | times fewer up | >= 1.5 | goal: of nobody",
    )
    out, found = found_by(Experiment(**vars(given) | {"rounds": 12, "clients": 2}))
    assert 1 < found.groups["wild"][0].diverged < 12
    assert math.isnan(found.number("wild", "uplink bytes"))
    assert out.claims[0].ok is False
