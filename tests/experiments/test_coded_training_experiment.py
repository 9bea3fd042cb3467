"""The experiment on coded training, very small; and its system through the command line's way, on every engine."""

from __future__ import annotations

import numpy as np
import pytest
from experiment_runs import Ran, ran

from fedcomp.errors import ConfigError
from fedcomp.experiments import engines
from fedcomp.experiments.catalog import coded_training
from fedcomp.experiments.catalog.coded_training import MODELS, SCHEMES, SPARSE, LinearProblem
from fedcomp.experiments.findings import Claim, Curves
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import check, get_system

SMALL = ("parities=4", "draws=200", "trials=400", "faulty_rounds=4")
LINEAR = {"parities": 2, "lr": 0.3, "task.l2": 0.001}


@pytest.fixture(scope="module")
def run() -> Ran:
    return ran(coded_training.EXPERIMENT, *SMALL, rounds=3, clients=8)


@pytest.mark.long
def test_all_is_measured(run: Ran) -> None:
    _, results, findings, *_ = run
    traffic, training, lossy, iteration = findings.tables
    assert [row[0] for row in traffic.rows] == list(SCHEMES)
    assert len(training.rows) == len(SCHEMES) * 2 * 4
    assert [row[1] for row in lossy.rows] == [4, 4]
    assert [row[0] for row in iteration.rows] == list(results)
    (figure,) = findings.figures
    assert isinstance(figure, Curves)
    assert len(figure.series) == len(SCHEMES)


@pytest.mark.long
def test_traffic_never_stands_without_the_decode_probability(
    run: Ran,
) -> None:
    traffic = run[2].tables[0]
    assert [c for c in traffic.columns if c.startswith("P(decodes)")] == [
        f"P(decodes) at loss {q:g}" for q in (0.1, 0.2, 0.3)
    ]
    claims = run[2].claims
    assert all("P(decodes)" in claim.name for claim in claims if "mean over draws" in claim.name)
    assert sum("mean over draws" in claim.name for claim in claims) == len(SPARSE)


@pytest.mark.long
def test_what_holds_by_derivation_holds_at_any_size(run: Ran) -> None:
    claims = run[2].claims
    assert len({claim.name for claim in claims}) == len(claims)
    assert all(claim.source for claim in claims)
    derived = [claim for claim in claims if claim.source.startswith(("derived", "the same parcels"))]
    assert len(derived) >= 9
    assert [claim.name for claim in derived if not claim.ok] == []
    assert [claim.name for claim in claims if "mean over draws" in claim.name and not claim.ok] == []


@pytest.mark.long
def test_each_claim_can_fail(run: Ran) -> None:
    def broken(value: float) -> list[Claim]:
        """Claims where everything that is measured came out so; of ratios and differences the second part is small."""
        even = (coded_training.MDS, coded_training.HALF)
        schemes = {}
        for label in SCHEMES:
            chances = {f"{q:g}": 1.0 if label in even else value for q in coded_training.LOSS_RATES}
            schemes[label] = Record({"label": label, "mean": value, "over_bound": value, "average": chances})
        trained = [Record({"model": "svm", "loss": 0.0, "worst": value, "off": value, "accuracy": value})]
        lossy = [Record({"loss": q, "rounds": 1, "moved": value, "worst": value}) for q in (0.1, 0.2)]
        rows = {label: coded_training.CodedRow(value, value, value) for label in SCHEMES}  # type: ignore[arg-type]
        rows[coded_training.MDS] = coded_training.CodedRow(1, value, value)  # type: ignore[arg-type]
        return coded_training.claims(schemes, Records(trained), Records(lossy), rows, dict.fromkeys(MODELS, 0.0))

    names = [claim.name.partition(" (")[0] for claim in run[2].claims]
    assert [claim.name.partition(" (")[0] for claim in broken(1e9)] == names
    for value, operators in ((1e9, ("<=", "==", "<")), (-1e9, (">=", ">"))):
        wrong = [claim for claim in broken(value) if claim.op in operators]
        assert wrong
        assert [claim.name for claim in wrong if claim.ok] == []


@pytest.mark.long
def test_every_row_ends_in_the_model_of_uncoded_descent(
    run: Ran,
) -> None:
    config, results, *_ = run
    expected = LinearProblem.of(config, "logistic").uncoded(3)
    for label in SCHEMES:
        if label != coded_training.NONE:
            w = np.concatenate([array.ravel() for array in results[label].arrays.values()])
            assert np.abs(w - expected).max() < 1e-12
    # Flower's own averaging of full-batch steps is the same descent, in the model's float32.
    plain = np.concatenate([array.ravel() for array in results[coded_training.UNCODED].arrays.values()])
    assert 0 < np.abs(plain - expected).max() < 1e-5


@pytest.mark.long
def test_the_bytes_of_partitions_are_those_on_the_peer_links(
    run: Ran,
) -> None:
    config, results, findings, *_ = run
    for label in SPARSE:
        plan = coded_training.plan_of(config, label, config.seed)
        peer = results[label].ledger.by("round", "wire", link="peer")
        shown = {row[0]: row[2] for row in findings.tables[0].rows}
        assert peer == {1: shown[label]}
        # One for each owner: what it handed over in one message.
        assert results[label].ledger.total("messages", link="peer") == len({j for j, _ in plan.transfers})
        assert results[label].rounds[1].peer_wire_bytes == peer[1]
    assert results[coded_training.UNCODED].ledger.total("payload", link="peer") == 0


@pytest.mark.long
def test_training_under_losses_pauses_with_its_oracle(run: Ran) -> None:
    config = run[0]
    problem, plan = LinearProblem.of(config, "svm"), coded_training.plan_of(config, coded_training.COPIES, 0)
    found = coded_training.descend(problem, plan, 0.3, 60, 1)
    assert 10 < found["decoded"] < 60
    assert found["worst"] < 1e-12
    assert coded_training.descend(problem, plan, 0.0, 5, 1)["decoded"] == 5


@pytest.mark.long
@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_the_system_runs_end_to_end(model: str) -> None:
    settings = LINEAR | {"task.model": model, "code": "gaussian", "payload": "float32"}
    result = engines.run(RunSpec("coded-linear", task="breast-cancer", rounds=3, clients=6, settings=settings))
    assert [record.round for record in result] == [0, 1, 2, 3]
    assert all(record.failures == 0 for record in result)
    assert result.final.loss < result.rounds[0].loss
    assert result.final.metrics["linear.examples"] == 456
    assert result.rounds[1].metrics["linear.setup_bytes"] > 0 == result.final.metrics["linear.setup_bytes"]
    assert result.uplink_wire_bytes == result.ledger.total("wire", direction="up", link="hub")


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("digits", {}, "not linear in its inputs"),
        ("digits-zero", {"momentum": 0.9}, "momentum=0.9 does not fit"),
        ("digits-zero", {"epochs": 2}, "epochs=2 does not fit"),
        ("digits-zero", {"inner": "fedadam"}, "inner='fedadam' does not fit"),
        ("digits-zero", {"code": "vandermonde"}, "code must be one of"),
        ("digits-zero", {"transport": "post"}, "transport='post'"),
    ],
)
def test_what_cannot_work_is_found_before_anything_starts(task: str, settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(RunSpec("coded-linear", task=task, clients=6, settings=settings))
    assert get_system("coded-linear").needs == {"task": "linear"}
