"""One client, whatever it sends, moves a private sum by its bound at most, and costs nobody else a contribution."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from private_runs import federation, inner
from toy import model, put_sent_frame, stack

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import Identity, TopK
from fedcomp.errors import NoUsableReply
from fedcomp.layout import SmallDense
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg

NODES = 4
CLIP = 1e5


def run(codec, change=None, *, fault=None, clip=CLIP, metered=True):
    """Return model, report and strategy after a round without noise in which ``change`` alters one reply."""
    strategy = DpFedAvg(inner(), clip=clip, noise_multiplier=0.0, population=NODES, delta=1e-3)
    # The bias travels dense: an update has both parts.
    outer = strategy if codec is None else Compressed(strategy, codec, policy=SmallDense())
    grid = federation([compression(), private()], NODES, change=change, fault=fault, metered=metered)
    result = outer.start(grid, model(), num_rounds=1, timeout=9)
    return stack(result.arrays), outer.reports[1], strategy


def silent(delivery):
    return "silent" if delivery.partition == 1 else None


def plain(weight, bias=None):
    """Answer with a dense model."""

    def change(content: RecordDict) -> RecordDict:
        arrays = {
            "weight": Array(np.asarray(weight)),
            "bias": Array(np.zeros(12, np.float32) if bias is None else bias),
        }
        return RecordDict({"arrays": ArrayRecord(arrays)})

    return change


def framed(*tensors: wire.Tensor):
    def change(content: RecordDict) -> None:
        put_sent_frame(content, wire.encode(list(tensors)))

    return change


def header(**fields):
    def change(content: RecordDict) -> None:
        for name, value in fields.items():
            content["fedcomp.node"][name.replace("_", "-")] = value

    return change


def weights(value) -> np.ndarray:
    return np.full((40, 30), value, np.float32)


REST = wire.dense(np.zeros(12, np.float32))

REFUSED = {
    "two models": lambda c: RecordDict({"arrays": model(), "more": model()}),
    "a frame of another size": framed(wire.sparse((1201,), np.array([0]), np.float32([1])), REST),
    "more coordinates than allowed": framed(wire.sparse((1200,), np.arange(900), np.ones(900, np.float32)), REST),
    "a value that is not finite": framed(wire.sparse((1200,), np.array([0]), np.float32([np.inf])), REST),
    "no record": header(record=""),
    "a memory that is no number": header(memory=float("nan")),
    "the partition of another": header(partition_id=0),
    "no partition": header(partition_id=-1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_bounded_is_left_out_and_costs_nobody_else(name) -> None:
    without, _, _ = run(TopK(density=0.5), fault=silent)
    out, report, strategy = run(TopK(density=0.5), REFUSED[name])
    np.testing.assert_array_equal(out, without)
    assert len(report.refused) == 1
    assert len(strategy.privacy.entries[0].participants) == NODES, "who was asked took part"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "change"),
    [
        (None, plain(weights(1e30))),
        (None, plain(weights(-3e38))),
        (Identity(), framed(wire.dense(np.full(1212, 3e38, np.float32)))),
        (TopK(density=0.5), framed(wire.sparse((1200,), np.array([3]), np.float32([3e38])), REST)),
        (TopK(density=0.5), plain(weights(3e38), np.full(12, -3e38, np.float32))),
    ],
    ids=["dense", "negative", "identity", "topk", "dense among frames"],
)
def test_huge_updates_are_clipped_by_the_server(codec, change) -> None:
    clip = 1e3
    without, _, _ = run(codec, fault=silent, clip=clip)
    out, report, _ = run(codec, change, clip=clip)
    assert not report.refused
    moved = np.linalg.norm(out - without)
    assert 0.98 * clip / NODES < moved <= clip / NODES * (1 + 1e-5)


INNOCENT = {
    "metrics and a huge weight": lambda c: RecordDict({**c, "metrics": MetricRecord({"num-examples": 10**15})}),
    "a weight that is no number": lambda c: RecordDict({**c, "metrics": MetricRecord({"num-examples": float("nan")})}),
    "two metric records": lambda c: RecordDict({**c, "a": MetricRecord({"x": 1}), "b": MetricRecord({"y": 2.0})}),
    "a record of its own name": header(record="evil"),
    "buffers it was not asked for": lambda c: RecordDict({**c, "fedcomp.exact": ConfigRecord({"fedcomp.fcw1": b"x"})}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INNOCENT)
def test_what_a_reply_says_beside_the_update_decides_nothing(name) -> None:
    # In a round without privacy most of these cost the sender or, by their weight, all others.
    honest, _, _ = run(TopK(density=0.5))
    out, report, _ = run(TopK(density=0.5), INNOCENT[name])
    np.testing.assert_array_equal(out, honest)
    assert report.refused == {}
    assert report.compressed == NODES


def test_one_client_cannot_evict_another_by_its_form() -> None:
    # Two clients, two forms: where the usual form is put to a vote nobody has a majority, and both are left out.
    strategy = DpFedAvg(inner(), clip=CLIP, noise_multiplier=0.0, population=NODES, delta=1e-3)
    pair = Compressed(strategy, TopK(density=0.5))
    change = header(record="first")
    pair.start(federation([compression(), private()], 2, change=change, culprit=0), model(), num_rounds=1, timeout=9)
    assert pair.reports[1].refused == {}
    open_pair = Compressed(inner(), TopK(density=0.5))
    with pytest.raises(NoUsableReply, match="equally frequent"):
        open_pair.start(federation([compression()], 2, change=change, culprit=0), model(), num_rounds=1, timeout=9)


def test_updates_that_did_nothing_are_contributions() -> None:
    out, report, strategy = run(None, plain(weights(0.0)))
    without, _, _ = run(None, fault=silent)
    np.testing.assert_array_equal(out, without)
    assert report.refused == {}
    assert len(strategy.privacy.entries[0].participants) == NODES


def test_noise_from_the_same_round_does_not_depend_on_what_came() -> None:
    # What is left of two noisy runs without the honest sum is the same noise: the draw has nothing to do with replies.
    def noise(change, fault=None):
        strategy = DpFedAvg(
            inner(), clip=10.0, noise_multiplier=1.0, population=NODES, delta=1e-3, insecure_deterministic=True
        )
        grid = federation([private()], NODES, change=change, fault=fault)
        noisy = stack(strategy.start(grid, model(), num_rounds=1, timeout=9).arrays)
        exact, _, _ = run(None, change, fault=fault, clip=10.0)
        return noisy - exact

    np.testing.assert_allclose(noise(plain(weights(1e9))), noise(None, lambda d: "silent"), atol=1e-5)
