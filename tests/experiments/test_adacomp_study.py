"""The study of AdaComp: bytes are counted per layer in real frames, and what is looked into is what was sent."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from fake_engine import FakeEngine

from fedcomp.codecs import AdaComp
from fedcomp.experiments import engines
from fedcomp.experiments.catalog.adacomp import EXPERIMENT
from fedcomp.experiments.central import Sending
from fedcomp.experiments.kit import Records
from fedcomp.experiments.spec import RoundRecord, RunResult
from fedcomp.experiments.studies import adacomp
from fedcomp.experiments.tables import specs_of
from fedcomp.layout import Layout
from fedcomp.systems.pair import Pair

pytestmark = pytest.mark.filterwarnings("ignore::fedcomp.tasks.sources.DataWarning")

CONFIG = EXPERIMENT.configure(rounds=0)

CNN = {
    "conv1.weight": (16, 1, 5, 5),
    "conv2.weight": (32, 16, 5, 5),
    "hidden.weight": (64, 1568),
    "output.weight": (10, 64),
    **{f"{name}.bias": (size,) for name, size in (("conv1", 16), ("conv2", 32), ("hidden", 64), ("output", 10))},
}


@pytest.fixture(scope="module")
def run() -> dict[str, RunResult]:
    """Every row for three rounds of two clients, on the images that need no file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FEDCOMP_DATA", raising=False)
        return {spec.label: engines.run(spec) for spec in specs_of(EXPERIMENT, EXPERIMENT.configure(quick=True))}


def made(sizes: dict[str, int], replies: int, rounds: int = 20, **last: int) -> RunResult:
    """A result whose rounds report ``sizes``, the last tenth of them ``last``."""
    result = FakeEngine()(specs_of(EXPERIMENT, CONFIG)[1], on_round=None, checkpoint=None)
    late = sizes | {f"{name}.weight": size for name, size in last.items()}
    result.rounds = [
        RoundRecord(r, 0.5, 1.0, replies=replies, metrics={"report.tensor_bytes": late if r > rounds - 2 else sizes})
        for r in range(1, rounds + 1)
    ]
    result.arrays = {name: np.zeros(shape, np.float32) for name, shape in CNN.items()}
    return result


def records(result: RunResult) -> Records:
    """The layers of ``result`` taken for AdaComp's row, of which nothing else was looked into."""
    dense = FakeEngine()(specs_of(EXPERIMENT, CONFIG)[0], on_round=None, checkpoint=None)
    dense.arrays = result.arrays
    seen = {name: {key: [1.0] for key in CNN} for name in ("per_bin", "cosine")}
    return adacomp.layer_records({adacomp.DENSE: dense} | dict.fromkeys(adacomp.SPARSE, result), seen)


def test_small_tensors_are_not_compressed_and_claims_are_about_layers_of_many_bins() -> None:
    found = records(made({}, 1))
    assert [(r.layer, r.kind) for r in found.where(row=adacomp.ADACOMP)] == [
        ("conv2.weight", adacomp.CONV),
        ("hidden.weight", adacomp.FULL),
        ("output.weight", adacomp.FULL),
    ]
    of_claims = [adacomp.judged(CONFIG, found, adacomp.ADACOMP, kind).each("layer") for kind in adacomp.BIN]
    assert of_claims == [["conv2.weight"], ["hidden.weight"]]


def test_a_ratio_is_four_bytes_per_element_and_reply_over_bytes() -> None:
    found = records(made({"conv2.weight": 4 * 1280}, 4, conv2=4 * 640))
    conv, full = (found.one(row=adacomp.ADACOMP, layer=f"{name}.weight") for name in ("conv2", "hidden"))
    first, last = (adacomp.fewer(conv, size) for size in adacomp.ends(conv.bytes))
    assert first == 4 * 12_800 / 1280 == 40.0
    assert last == 2 * first
    # Of the bytes, not the mean of ratios.
    assert adacomp.ratio(CONFIG, found, adacomp.CONV) == pytest.approx(4 * 12_800 / (0.9 * 1280 + 0.1 * 640))
    assert not full.bytes
    assert math.isnan(adacomp.ratio(CONFIG, found, adacomp.FULL))


@pytest.mark.long
def test_bytes_of_the_layers_are_bytes_of_the_frames(run: dict[str, RunResult]) -> None:
    for label in adacomp.SPARSE:
        for record in run[label].rounds[1:]:
            tensors = record.metrics["report.tensor_bytes"]
            output = set() if label == adacomp.KEPT else {"output.weight"}
            assert set(tensors) == {"conv2.weight", "hidden.weight", "the dense rest"} | output
            # A header of 16 bytes, an end mark with padding and 4 bytes of checksum belong to no tensor.
            assert 20 <= (record.uplink_payload_bytes - sum(tensors.values())) / record.replies <= 32


@pytest.mark.long
def test_what_is_watched_is_the_row(run: dict[str, RunResult]) -> None:
    assert adacomp.watch(run[adacomp.ADACOMP])["differs"] == 0
    other = dataclasses.replace(run[adacomp.HARD], spec=run[adacomp.ADACOMP].spec)
    assert adacomp.watch(other)["differs"] > 0


def test_the_look_ahead_of_a_watched_round_is_counted() -> None:
    """What the update lifts over the largest of its bin is sent, twenty of each; with factor 1 only the largest is."""
    layout = Layout.of({"w": np.zeros((4, 1000), np.float32)})
    total = np.full(4000, 1e-3, np.float32)
    total[::500] = 1.0
    gradient = np.zeros(4000, np.float32)
    gradient[np.arange(4000) % 500 < 20] = 2.0
    for factor, expected in ((2.0, 20.0), (1.0, 1.0)):
        codec = AdaComp(factor=factor)
        rounds = Sending(Pair(codec), layout, 1, 0)
        rounds.local.client(0).memory = {**codec.init(layout), "memory": total - gradient}
        _, cost = rounds.send(1, [gradient])
        per_bin, cosine = adacomp.watched(codec, rounds.seen(1))["w"]
        assert per_bin == expected
        assert cost.kept == [8 * expected]
        assert cosine == pytest.approx(adacomp.cosine(total - gradient, gradient))


def test_cosine() -> None:
    a = np.array([3.0, 4.0], np.float32)
    assert adacomp.cosine(a, 2 * a) == pytest.approx(1.0)
    assert adacomp.cosine(a, -a) == pytest.approx(-1.0)
    assert adacomp.cosine(a, np.array([-4.0, 3.0], np.float32)) == pytest.approx(0.0)
    assert adacomp.cosine(a, np.zeros(2, np.float32)) == 0.0
