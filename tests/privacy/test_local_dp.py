"""Noise on the client: its scale, what bounds it, what may stand behind it, and what the server may say."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields

import numpy as np
import pytest
from private_runs import federation, inner
from toy import model, stack

from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import QSGD, Identity, RandomK, TopK, chain, get_codec, get_transform
from fedcomp.codecs.clip import Clip
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, NoUsableReply, StateError
from fedcomp.flower.privacy import find_private
from fedcomp.flower.rounds import fit
from fedcomp.layout import Layout, Update
from fedcomp.privacy.accounting import gaussian_epsilon
from fedcomp.privacy.errors import BudgetExceeded
from fedcomp.privacy.local import Privatise, privatised
from fedcomp.privacy.sampling import Sampling
from fedcomp.rng import Key
from fedcomp.strategies.coded.strategy import CodedFedAvg
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.local_dp import LocalMean, local_dp

KEY = Key(1, "uplink", 1, 0)
BASIC = {"clip": 1.0, "noise_multiplier": 2.0, "population": 4, "delta": 1e-3}


def noised(vector, privatise=None, state=None, key=KEY) -> np.ndarray:
    vector = np.asarray(vector, np.float32)
    layout = Layout.flat(vector.size)
    privatise = Privatise(1.0, 2.0) if privatise is None else privatise
    out, _ = privatise.apply(Update(vector, layout), privatise.init(layout) if state is None else state, key)
    return out.vector


def test_any_two_clipped_updates_are_at_most_twice_the_clip_norm_apart() -> None:
    privatise = Privatise(1.0, 0.0)
    corners = [10.0 * np.array(c) for c in itertools.product([-1, 0, 1], repeat=3)]
    ends = [noised(c, privatise) for c in corners]
    apart = max(float(np.linalg.norm(a - b)) for a in ends for b in ends)
    assert 2 * 0.99 <= apart <= 2 * (1 + 1e-6)
    assert privatise.mechanism(3).sensitivity * privatise.mechanism(3).step == 2.0


def test_outputs_lie_on_one_grid_whatever_the_update() -> None:
    step = Privatise(1.0, 2.0).mechanism(6).step
    for vector in (np.zeros(6), np.full(6, 0.123456), np.full(6, 1e9)):
        out = noised(vector).astype(np.float64) / step
        np.testing.assert_array_equal(out, np.rint(out))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_becomes_noise_alone(bad) -> None:
    out = noised([1.0, bad] * 500)
    assert np.isfinite(out).all()
    assert abs(np.sum((out / 4.0) ** 2) - 1000) < 6 * math.sqrt(2000)


def test_every_message_has_noise_of_its_own_and_no_seed_repeats_it() -> None:
    first, second = (noised(np.zeros(64)) for _ in range(2))
    assert (first != second).any()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.6
    seeded = Privatise(1.0, 2.0, insecure_deterministic=True)
    np.testing.assert_array_equal(noised(np.zeros(64), seeded), noised(np.zeros(64), seeded))
    others = [noised(np.zeros(64), seeded, key=KEY.at(**{c: 5})) for c in ("round", "partition")]
    assert all((noised(np.zeros(64), seeded) != o).any() for o in others)


def test_messages_are_counted_and_limited_and_a_lost_one_stays_counted() -> None:
    codec = chain(Privatise(1.0, 2.0, releases=2), TopK(density=0.5))
    layout = Layout.flat(8)
    update, state = Update(np.ones(8, np.float32), layout), codec.init(layout)
    frame, state = codec.encode(update, state, KEY)
    state = codec.rollback(state, frame, layout)
    assert int(state["0.releases"]) == 1
    _, state = codec.encode(update, state, KEY)
    with pytest.raises(BudgetExceeded, match="2 private messages of 2"):
        codec.encode(update, state, KEY)
    for broken in ({}, {"0.releases": np.zeros(2, np.int64)}, {"0.releases": np.asarray(1.5)}):
        with pytest.raises(StateError):
            codec.encode(update, broken, KEY)


def test_memory_behind_the_noise_holds_noised_values_only() -> None:
    # Two clients with opposite data and the same noise: what they remember differs as what they sent may, by 2C.
    seeded = Privatise(1.0, 2.0, insecure_deterministic=True)
    codec = chain(seeded, ErrorFeedback(TopK(density=0.25)))
    layout = Layout.flat(16)
    memories = []
    for sign in (1.0, -1.0):
        _, state = codec.encode(Update(np.full(16, sign * 100, np.float32), layout), codec.init(layout), KEY)
        memories.append(codec.residual(state))
    assert np.linalg.norm(memories[0] - memories[1]) <= 2.0
    # Memory of values that are not noised differs by what the data do.
    naive = ErrorFeedback(TopK(density=0.25))
    raw = [
        naive.encode(Update(np.full(16, s, np.float32), layout), naive.init(layout), KEY)[1] for s in (100.0, -100.0)
    ]
    assert np.linalg.norm(raw[0]["memory"] - raw[1]["memory"]) > 100


def test_it_travels_by_name() -> None:
    privatise = Privatise(0.5, 3.0, releases=7)
    assert get_transform(privatise.to_config()) == privatise
    codec = chain(privatise, QSGD(levels=4))
    again = get_codec(codec.to_config())
    assert again == codec
    assert privatised(again) == privatise
    for wrong in ({"clip": 0.0}, {"noise_multiplier": -1.0}, {"noise_multiplier": math.nan}, {"releases": 1.5}):
        with pytest.raises(ConfigError):
            Privatise(**{"clip": 1.0, "noise_multiplier": 1.0, **wrong})


def test_what_counts_as_privatised() -> None:
    p = Privatise(1.0, 2.0)
    for codec in (
        chain(p, TopK(density=0.5)),
        chain(Clip(3.0), p, TopK(density=0.5)),
        chain(p, ErrorFeedback(TopK(density=0.5))),
        ErrorFeedback(chain(p, TopK(density=0.5))),
    ):
        assert privatised(codec) == p
    for codec in (TopK(density=0.5), chain(Clip(1.0), TopK(density=0.5)), Identity()):
        assert privatised(codec) is None


def local(codec, **changes) -> Compressed:
    given = {**BASIC, **changes}
    own = {field.name: given.pop(field.name) for field in fields(Privatise) if field.name in given}
    return local_dp(inner(), Privatise(**own), codec, **given)


def run(strategy, *, fault=None, rounds=2, mods=None, nodes=4):
    mods = [compression(), private()] if mods is None else mods
    grid = federation(mods, nodes, fault=fault, metered=False)
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [Identity(), QSGD(levels=64), TopK(density=0.2), RandomK(density=0.5)], ids=str)
def test_the_server_averages_messages_and_adds_nothing(codec) -> None:
    strategy = local(codec, clip=3e4, noise_multiplier=0.0)
    result = run(strategy, rounds=1)
    assert np.linalg.norm(stack(result.arrays)) > 1e3
    report = strategy.reports[1]
    assert (report.compressed, report.refused, report.memory) == (4, {}, {})
    assert find_private(strategy).privacy.epsilon() == math.inf


def test_messages_are_paid_for_when_they_are_asked_for() -> None:
    strategy = local(QSGD(levels=8))
    run(strategy, fault=lambda d: "lost_reply" if d.partition or d.round == 2 else None)
    ledger = find_private(strategy).privacy
    assert set(ledger.participations.values()) == {2}
    assert len(ledger.participations) == 4
    assert ledger.epsilon() == pytest.approx(gaussian_epsilon(math.sqrt(2.0) / 2.0, 1e-3), rel=1e-7)
    told = strategy.inner.statement()
    assert (told.adjacency, told.sensitivity, told.sigma) == ("replace", 2.0, 4.0)
    assert "nobody is trusted" in told.prose()
    assert told.secure


def test_the_ledger_is_written_before_anybody_is_asked(monkeypatch) -> None:
    strategy = local(QSGD(levels=8))

    def refuse(*args, **kwargs):
        raise BudgetExceeded("no")

    monkeypatch.setattr(strategy.inner.privacy, "record", refuse)
    trained = []
    grid = federation([compression(), private()], 4, fault=lambda d: trained.append(d))
    with pytest.raises(BudgetExceeded):
        strategy.start(grid, model(), num_rounds=1, timeout=9)
    assert trained == []


def test_the_cap_is_one_of_messages_and_ends_the_run() -> None:
    strategy = local(QSGD(levels=8), sampling=Sampling("capped", cap=2))
    run(strategy, rounds=4)
    assert set(find_private(strategy).privacy.participations.values()) == {2}
    assert "as often as it may" in find_private(strategy).over(5)


def test_a_client_that_does_not_privatise_is_left_out() -> None:
    strategy = local(QSGD(levels=8))
    with pytest.raises(NoUsableReply, match="did not privatise"):
        run(strategy, mods=[private()], rounds=1)
    assert len(strategy.reports[1].refused) == 4
    assert "did not privatise" in next(iter(strategy.reports[1].refused.values()))
    assert LocalMean.takes_plain is False
    assert DpFedAvg.takes_plain is True


def test_without_the_pair_nobody_is_asked_for_what_nobody_would_privatise() -> None:
    bare = LocalMean(inner(), Privatise(1.0, 2.0), population=4, delta=1e-3)
    with pytest.raises(ConfigError, match="it belongs inside Compressed"):
        fit(bare, federation([compression(), private()], 4), model(), 1)
    with pytest.raises(ConfigError, match="does not begin with Privatise"):
        CodedFedAvg(bare, construction="relay")
    assert bare.privacy.releases == 0


def test_what_local_privacy_cannot_mean_is_refused() -> None:
    for change, said in (
        ({"sampling": Sampling("poisson", rate=0.5)}, "amplifies nothing"),
        ({"adjacency": "zero_out"}, "adjacency of local privacy is 'replace'"),
        ({"noise": "skellam"}, "noise of local privacy"),
        ({"population": 1000}, "below 1/1000"),
    ):
        with pytest.raises(ConfigError, match=said):
            local(Identity(), **change)
    promise = {"population": 4, "delta": 1e-3}
    mean = LocalMean(inner(), Privatise(1.0, 2.0), **promise)
    for codec in (Identity(), chain(Privatise(1.0, 1.0), Identity()), TopK(density=0.5)):
        with pytest.raises(ConfigError, match="does not begin with"):
            Compressed(mean, codec, feedback=False)
    Compressed(mean, chain(Privatise(1.0, 2.0), Identity()), feedback=False)
