"""Hostile voters: refused before anything is added, and the round's promise is what it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from private_runs import forged
from topagg_runs import BALLOT, NODES, SIZE, app, learnt, run, strategy
from toy import put_sent_frame

from fedcomp import wire
from fedcomp.layout import Layout
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.mechanism import PrivateSum
from fedcomp.privacy.votes import TopkSign
from fedcomp.wire.fuzz import seal

CULPRIT = 3
K = BALLOT.k
SETTINGS = {"noise_multiplier": 2.0, "server_lr": 1.0}
Evil = Callable[[RecordDict], RecordDict | None]


def forger(evil: Evil) -> Callable[[Message, Context], Message]:
    """Return the app with one client whose reply ``evil`` changes."""
    return forged(app(), evil, CULPRIT)


def frame(*tensors: wire.Tensor) -> Evil:
    def evil(content: RecordDict) -> None:
        put_sent_frame(content, wire.encode(list(tensors)))

    return evil


def signs(count: int) -> wire.UnitSign:
    return wire.UnitSign(np.zeros(count, np.bool_))


def listed(values: wire.Values, size: int = SIZE, indices: np.ndarray | None = None) -> wire.Tensor:
    return wire.sparse((size,), np.arange(values.k) if indices is None else indices, values)


def twice_the_same_index(content: RecordDict) -> None:
    """Fixed-width indices 4, 4 instead of 4, 5, sealed again: one coordinate would count twice."""
    tensor = wire.sparse((SIZE,), np.array([4, 5]), signs(2), index="raw")
    sent = wire.encode([tensor])[:-4].replace(b"\x04\0\0\0\x05\0\0\0", b"\x04\0\0\0\x04\0\0\0")
    put_sent_frame(content, seal(sent))


def overflowing(content: RecordDict) -> RecordDict:
    """Reply as a client without the mods, with doubles that the model's floats cannot hold."""
    tensors = {"weight": np.zeros((40, 30)), "bias": np.full(12, 1e300)}
    return RecordDict({"arrays": ArrayRecord({name: Array(values) for name, values in tensors.items()})})


BAD: dict[str, Evil] = {
    "k + 1 votes": frame(listed(signs(K + 1))),
    "all coordinates": frame(listed(signs(SIZE))),
    "all coordinates, dense": frame(wire.Tensor(signs(SIZE), (SIZE,))),
    "values of 2": frame(listed(wire.Raw(np.full(K, 2, np.float32)))),
    "a scale of 1000": frame(listed(wire.SignScale(np.zeros(K, np.bool_), np.float32([1000.0])))),
    "a scale of 1": frame(listed(wire.SignScale(np.zeros(K, np.bool_), np.float32([1.0])))),
    "ternary levels": frame(listed(wire.Ternary(np.ones(K), 3.0))),
    "NaN": frame(listed(wire.Raw(np.full(K, np.nan, np.float32)))),
    "infinity": frame(listed(wire.Raw(np.full(K, np.inf, np.float32)))),
    "one element more": frame(listed(signs(K), SIZE + 1)),
    "a matrix": frame(wire.sparse((SIZE, 1), np.arange(K), signs(K))),
    "two tensors": frame(listed(signs(K)), listed(signs(K))),
    "no tensor": frame(),
    "coefficients": frame(wire.Tensor(signs(K), (SIZE,), kind=wire.COEFFICIENTS)),
    "a seeded support": frame(wire.seeded((SIZE,), 5, K, signs(K))),
    "a dense rest beside the votes": frame(listed(signs(K)), wire.dense(np.ones(12, np.float32))),
    "the same index twice": twice_the_same_index,
    "a dense model that overflows": overflowing,
}


@pytest.fixture(scope="module")
def without() -> tuple[np.ndarray, list]:
    """The model of a round whose culprit never answers, and what it costs."""
    chosen = strategy(**SETTINGS)
    moved, *_ = run(chosen, fault=lambda d: "silent" if d.partition == CULPRIT else None)
    return moved, chosen.inner.privacy.events


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_1_11_h_a_forged_vote_costs_nobody_but_its_sender(name: str, without: tuple[np.ndarray, list]) -> None:
    """Refused and reported; event, noise and the sum of the others are bit for bit those of its absence."""
    chosen = strategy(**SETTINGS)
    moved, *_ = run(chosen, client=forger(BAD[name]))
    report, ledger = chosen.reports[1], chosen.inner.privacy
    assert len(report.refused) == 1
    assert report.compressed == NODES - 1
    assert moved.tobytes() == without[0].tobytes()
    assert ledger.events == without[1]
    assert [event.noise_multiplier for event in ledger.events] == [2.0]
    assert len(ledger.participations) == NODES, "who was asked took part"


def test_1_11_h_a_layer_cannot_vote_for_another() -> None:
    """Per-layer k: the total would be within the bound, but a tensor has more than its own share."""
    ballot = TopkSign(k=K, scope="layer")
    options = {**SETTINGS, "policy": lambda *_: None}
    layout_shares: list[int] = []

    def evil(content: RecordDict) -> None:
        shares = [ballot.count(s) for s in ballot.stretches(chosen.layout)]
        layout_shares.extend(shares)
        first, second = shares[0] - 1, shares[1] + 1
        tensors = [listed(signs(first), 1200), listed(signs(second), 30)]
        put_sent_frame(content, wire.encode(tensors))

    chosen, absent = strategy(ballot, **options), strategy(ballot, **options)
    moved, *_ = run(chosen, client=forger(evil))
    other, *_ = run(absent, fault=lambda d: "silent" if d.partition == CULPRIT else None)
    assert sum(layout_shares) == K
    assert len(chosen.reports[1].refused) == 1
    assert moved.tobytes() == other.tobytes()


def test_no_vector_that_is_no_vote_passes_the_strategy() -> None:
    """The mechanism's own door, without any codec before it: floats that look like votes, and those that do not."""
    private = strategy(pair=False, noise_multiplier=1.0)
    layout = Layout.flat(SIZE)
    votes = np.zeros(SIZE, np.float32)
    votes[:K] = np.sign(learnt(1, 0)[:K] + 0.5)
    total = PrivateSum(private.mechanism(layout, 1), (SIZE,))
    total.add(1, private.contribution(votes, layout, 1))
    for at, value in ((0, 2.0), (0, 0.5), (0, np.nan), (0, np.inf), (0, -128.0), (0, 256.0), (0, 1e9), (K, 1.0)):
        forged = votes.copy()
        forged[at] = value
        with pytest.raises(Unbounded):
            total.add(2, private.contribution(forged, layout, 1))
    with pytest.raises(Unbounded, match="already"):
        total.add(1, private.contribution(votes, layout, 1))
    with pytest.raises(Unbounded):
        total.add(3, private.contribution(votes[:-1], layout, 1))
    assert total.participants == [1]
