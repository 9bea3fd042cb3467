"""The experiment on AdaComp: bytes are counted per layer in real frames, and what is looked into is what was sent."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine

from fedcomp.codecs import AdaComp
from fedcomp.experiments import engines
from fedcomp.experiments.catalog import adacomp
from fedcomp.experiments.central import Sending
from fedcomp.experiments.findings import Curves, Findings, Say
from fedcomp.experiments.kit import Record, Records
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RoundRecord, RunResult
from fedcomp.experiments.tables import specs_of
from fedcomp.layout import Layout
from fedcomp.systems.pair import Pair

pytestmark = pytest.mark.filterwarnings("ignore::fedcomp.tasks.sources.DataWarning")

CNN = {
    "conv1.weight": (16, 1, 5, 5),
    "conv2.weight": (32, 16, 5, 5),
    "hidden.weight": (64, 1568),
    "output.weight": (10, 64),
    **{f"{name}.bias": (size,) for name, size in (("conv1", 16), ("conv2", 32), ("hidden", 64), ("output", 10))},
}


@pytest.fixture(scope="module")
def run() -> tuple[Config, dict[str, RunResult], Findings]:
    """Every row for three rounds of two clients, on the images that need no file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDCOMP_DATA", raising=False)
        config = adacomp.EXPERIMENT.configure(quick=True)
        results = {spec.label: engines.run(spec) for spec in specs_of(adacomp.EXPERIMENT, config)}
        return config, results, adacomp.measure(config, results, Say())


def made(sizes: dict[str, int], replies: int, rounds: int = 20, **last: int) -> RunResult:
    """A result whose rounds report ``sizes``, the last tenth of them ``last``."""
    config = adacomp.EXPERIMENT.configure(rounds=0)
    result = FakeEngine()(adacomp.rows(config)[1], on_round=None, checkpoint=None)
    late = sizes | {f"{name}.weight": size for name, size in last.items()}
    result.rounds = [
        RoundRecord(r, 0.5, 1.0, replies=replies, metrics={"report.tensor_bytes": late if r > rounds - 2 else sizes})
        for r in range(1, rounds + 1)
    ]
    result.arrays = {name: np.zeros(shape, np.float32) for name, shape in CNN.items()}
    return result


def records(result: RunResult) -> Records:
    """The layers of ``result`` taken for AdaComp's row, of which nothing else was looked into."""
    dense = FakeEngine()(adacomp.rows(adacomp.EXPERIMENT.configure(rounds=0))[0], on_round=None, checkpoint=None)
    dense.arrays = result.arrays
    seen = {name: {key: [1.0] for key in CNN} for name in ("per_bin", "cosine")}
    return adacomp.layer_records({adacomp.DENSE: dense} | dict.fromkeys(adacomp.SPARSE, result), seen)


def test_small_tensors_are_not_compressed_and_claims_are_about_layers_of_many_bins() -> None:
    found, config = records(made({}, 1)), adacomp.EXPERIMENT.configure(rounds=0)
    assert [(r.layer, r.kind) for r in found.where(row=adacomp.ADACOMP)] == [
        ("conv2.weight", adacomp.CONV),
        ("hidden.weight", adacomp.FULL),
        ("output.weight", adacomp.FULL),
    ]
    of_claims = [adacomp.judged(config, found, adacomp.ADACOMP, kind).each("layer") for kind in adacomp.GOALS]
    assert of_claims == [["conv2.weight"], ["hidden.weight"]]


def test_a_ratio_is_four_bytes_per_element_and_reply_over_bytes() -> None:
    found = records(made({"conv2.weight": 4 * 1280}, 4, conv2=4 * 640))
    conv, full = (found.one(row=adacomp.ADACOMP, layer=f"{name}.weight") for name in ("conv2", "hidden"))
    first, last = (adacomp.fewer(conv, size) for size in adacomp.ends(conv.bytes))
    assert first == 4 * 12_800 / 1280 == 40.0
    assert last == 2 * first
    # Of the bytes, not the mean of ratios.
    config = adacomp.EXPERIMENT.configure(rounds=0)
    assert adacomp.ratio(config, found, adacomp.CONV) == pytest.approx(4 * 12_800 / (0.9 * 1280 + 0.1 * 640))
    assert not full.bytes
    assert math.isnan(adacomp.ratio(config, found, adacomp.FULL))


@pytest.mark.long
def test_bytes_of_the_layers_are_bytes_of_the_frames(run: tuple[Config, dict[str, RunResult], Findings]) -> None:
    _, results, _ = run
    for label in adacomp.SPARSE:
        for record in results[label].rounds[1:]:
            tensors = record.metrics["report.tensor_bytes"]
            output = set() if label == adacomp.KEPT else {"output.weight"}
            assert set(tensors) == {"conv2.weight", "hidden.weight", "the dense rest"} | output
            # A header of 16 bytes, an end mark with padding and 4 bytes of checksum belong to no tensor.
            assert 20 <= (record.uplink_payload_bytes - sum(tensors.values())) / record.replies <= 32


@pytest.mark.long
def test_the_run_without_messages_is_the_row(run: tuple[Config, dict[str, RunResult], Findings]) -> None:
    _, results, findings = run
    assert findings.claims[-1].value == 0.0
    other = dataclasses.replace(results[adacomp.HARD], spec=results[adacomp.ADACOMP].spec)
    assert adacomp.watch(other)["differs"] > 0


@pytest.mark.long
def test_all_is_measured(run: tuple[Config, dict[str, RunResult], Findings]) -> None:
    config, _, findings = run
    losses, layers = findings.tables
    assert [row[0] for row in losses.rows] == [adacomp.DENSE, *adacomp.SPARSE]
    assert losses.rows[0][2] == losses.rows[0][4] == 1.0
    assert [(row[0], row[1]) for row in layers.rows] == [
        (layer, label)
        for layer in ("conv2.weight", "hidden.weight", "output.weight")
        for label in adacomp.SPARSE
        if (layer, label) != ("output.weight", adacomp.KEPT)
    ]
    assert "522 elements travel dense" in layers.caption
    assert "conv1.weight" in layers.caption
    assert all(isinstance(f, Curves) and all(s.y for s in f.series) for f in findings.figures)
    assert not any(math.isnan(claim.value) for claim in findings.claims)
    assert all(claim.ok for claim in findings.claims if claim.source.startswith(("theory", "derived")))
    used = {key for spec in adacomp.rows(config) for key in spec.settings}
    assert set(adacomp.OPTIONS) <= used
    assert findings.tasks[0]["options"]["train_examples"] == 40


def test_the_look_ahead_of_a_watched_round_is_counted() -> None:
    """What the update lifts over the largest of its bin is sent, twenty of each; with factor 1 only the largest is."""
    layout = Layout.of({"w": np.zeros((4, 1000), np.float32)})
    total = np.full(4000, 1e-3, np.float32)
    total[::500] = 1.0
    gradient = np.zeros(4000, np.float32)
    gradient[np.arange(4000) % 500 < 20] = 2.0
    for factor, expected in ((2.0, 20.0), (1.0, 1.0)):
        codec = AdaComp(factor=factor)
        watched = adacomp.Watched(codec)
        rounds = Sending(Pair(codec), layout, 1, 0)
        rounds.local.client(0).memory = {**codec.init(layout), "memory": total - gradient}
        _, cost = rounds.send(1, [gradient])
        watched(rounds.seen(1))
        assert watched.per_bin == {"w": [expected]}
        assert cost.kept == [8 * expected]
        assert watched.cosine["w"][0] == pytest.approx(adacomp.cosine(total - gradient, gradient))


def test_cosine() -> None:
    a = np.array([3.0, 4.0], np.float32)
    assert adacomp.cosine(a, 2 * a) == pytest.approx(1.0)
    assert adacomp.cosine(a, -a) == pytest.approx(-1.0)
    assert adacomp.cosine(a, np.array([-4.0, 3.0], np.float32)) == pytest.approx(0.0)
    assert adacomp.cosine(a, np.zeros(2, np.float32)) == 0.0


def layer(row: str, kind: str, size: int, first: float, last: float, **more: list[float]) -> Record:
    """A layer whose bytes are ``first``, then ``last``."""
    return Record({"row": row, "kind": kind, "size": size, "bytes": [first, last], "per_bin": [12.0, 4.0], **more})


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({"kept": 1.11}, "small layers dense: train loss"),
        ({"whole": 1.11}, "AdaComp: train loss"),
        ({"conv": 39.0}, "convolutional layers, bins of 50"),
        ({"full": 149.0}, "fully connected layers, bins of 500"),
        ({"per_bin": [12.0, 12.0]}, "elements sent per bin"),
        ({"last": 1000.0}, "factor 1"),
        ({"differs": 1.0}, "differ"),
    ],
)
def test_each_claim_can_fail(change: dict[str, Any], broken: str) -> None:
    def claims(*, kept=1.09, whole=1.09, conv=41.0, full=151.0, last=1310.0, differs=0.0, per_bin=(12.0, 4.0)):
        found = [
            layer(adacomp.ADACOMP, adacomp.CONV, 12_800, 4 * 12_800 / conv, 4 * 12_800 / conv),
            layer(adacomp.ADACOMP, adacomp.FULL, 100_352, 401_408 / full, 401_408 / full, per_bin=list(per_bin)),
            layer(adacomp.HARD, adacomp.FULL, 100_352, 1300.0, last),
        ]
        losses = {adacomp.DENSE: 1.0, adacomp.ADACOMP: whole, adacomp.KEPT: kept}
        return adacomp.claims(adacomp.EXPERIMENT.configure(), losses, Records(found), differs)

    assert all(claim.ok for claim in claims())
    failed = [claim for claim in claims(**change) if not claim.ok]
    assert len(failed) == 1
    assert broken in failed[0].name
    assert failed[0].gate == (broken != "AdaComp: train loss")
