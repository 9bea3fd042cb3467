"""LSG-style training by clients: what is sent, what the model becomes, what it costs, and who is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import topagg_runs
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from topagg_runs import NODES, SIZE, App, flat, learnt
from toy import SHAPES, by_partition, client_app, fedavg

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.clients.private.mod import private
from fedcomp.codecs import Identity, TopK
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower.asks import data_in
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import FRAME
from fedcomp.layout import Layout, Update
from fedcomp.privacy.lsg import LowRankPlan
from fedcomp.program import AnswerError, Ask, Me
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.private.dp_fedavg import DpFedAvg
from fedcomp.strategies.private.lsg import Lsg
from fedcomp.systems.private.lsg import LowRank, carried

PLAN = LowRankPlan.of(SHAPES, 5)
CLIP = 2000.0
"""The toy's updates have norms of about 20000: all are clipped."""


def strategy(**options: Any) -> Lsg:
    chosen = {
        "clip": CLIP,
        "rank": 5,
        "keep": 0.5,
        "noise_multiplier": 0.0,
        "population": NODES,
        "delta": 1e-3,
        "insecure_deterministic": True,
        "seed": 7,
        **options,
    }
    own = {field.name: chosen.pop(field.name) for field in fields(LowRank) if field.name in chosen}
    return Lsg(fedavg(fraction_evaluate=0.0), LowRank(**own), **chosen)


def app() -> ClientApp:
    return client_app([compression(), private()])


def run(chosen: Any, *, rounds: int = 1, client: App | None = None) -> tuple:
    moved, result, metered = topagg_runs.run(chosen, rounds=rounds, client=client or app(), initial=start())
    return moved.astype(np.float64), result, metered


def start() -> ArrayRecord:
    """A model of full rank, so that its carriers are its own directions."""
    draws = Key(1).generator()
    return ArrayRecord({k: Array(draws.standard_normal(s).astype(np.float32)) for k, s in SHAPES.items()})


def by_hand(
    model_before: np.ndarray, server_round: int, share: float, who: Any = range(NODES)
) -> tuple[np.ndarray, np.ndarray, tuple]:
    """Return the update of the model from the definition, the kept coordinates and the carriers."""
    pairs = PLAN.carriers(model_before, Key(7, "lsg/carriers", server_round))
    kept = LowRank(clip=CLIP, rank=5, keep=share).drawn(PLAN.short, server_round, 7)
    total = np.zeros(PLAN.short)
    for partition in who:
        short = np.concatenate(PLAN.project(learnt(server_round, partition).astype(np.float64), pairs))[kept]
        total[kept] += short * min(1.0, CLIP / np.linalg.norm(short))
    return PLAN.reconstruct(total / NODES, pairs), kept, pairs


def test_the_model_moves_by_the_reconstructed_mean_of_clipped_coordinates() -> None:
    moved, result, _ = run(strategy())
    before = flat(start()).astype(np.float64)
    step, kept, _ = by_hand(before, 1, 0.5)
    assert kept.size == math.ceil(0.5 * (5 * 70 + 12))
    # A grid step is 2000 / 1024, and the reconstruction adds up several of them.
    assert np.linalg.norm(step) > 100
    np.testing.assert_allclose(moved - before, step, atol=3.0)
    assert not any(len(record) for record in result.train_metrics_clientapp.values())


def test_rank_zero_is_the_random_mask_alone() -> None:
    moved, *_ = run(strategy(rank=0, keep=0.25))
    changed = np.flatnonzero(np.abs(moved - flat(start())) > 1e-3)
    drawn = LowRank(clip=CLIP, rank=0, keep=0.25).drawn(SIZE, 1, 7)
    assert 0.9 * math.ceil(0.25 * SIZE) < changed.size <= math.ceil(0.25 * SIZE)
    assert np.isin(changed, drawn).all()


def test_2_6_everything_kept_of_nothing_factored_is_dp_fedavg_up_to_the_grid() -> None:
    ours, *_ = run(strategy(rank=0, keep=1.0, noise_multiplier=1.5), rounds=2)
    settings = {"population": NODES, "delta": 1e-3, "insecure_deterministic": True, "seed": 7}
    plain = DpFedAvg(fedavg(fraction_evaluate=0.0), clip=CLIP, noise_multiplier=1.5, **settings)
    theirs, *_ = run(plain, rounds=2, client=client_app([private()]))
    # Clipped on the client in float32 here, on the server there: a grid step at most.
    np.testing.assert_allclose(ours, theirs, atol=2.1 * 2 * CLIP / 2048)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "adjacency"), [(0, "zero_out"), (5, "replace")])
def test_2_6_noise_is_on_the_kept_coordinates_alone_and_its_energy_is_within_three_per_cent(
    rank: int, adjacency: str
) -> None:
    """Rounds nobody answers, from the same model: what is released is what the noise is reconstructed to."""
    chosen = strategy(rank=rank, keep=0.25, noise_multiplier=2.0, clip=1.0, adjacency=adjacency)
    before, energy, rounds = flat(start()).astype(np.float64), [], 100
    with InProcessGrid(app(), NODES, seed=3) as grid:
        for number in range(1, rounds + 1):
            list(chosen.configure_train(number, start(), ConfigRecord({"server-round": number}), grid))
            arrays, _ = chosen.aggregate_train(number, [])
            moved = (flat(arrays) - before) * NODES
            energy.append(np.square(moved).sum())
            if not rank:
                outside = np.delete(moved, chosen.settings.drawn(SIZE, number, 7))
                assert np.abs(outside).max() < 1e-5 < np.abs(moved).max()
    sigma = 2.0 * (2.0 if adjacency == "replace" else 1.0)
    expected = sigma**2 * LowRankPlan.of(SHAPES, rank).energy(0.25)
    assert np.mean(energy) == pytest.approx(expected, rel=0.03)
    assert {(e.noise_multiplier, e.rate) for e in chosen.privacy.events} == {(2.0, 1.0)}
    assert chosen.privacy.releases == rounds


def test_an_update_is_as_many_floats_as_are_kept_and_no_indices() -> None:
    """Bytes of real messages: payload up and down, against the frame's own overhead."""
    _, _, grid = run(strategy(keep=0.25), rounds=2)
    count = math.ceil(0.25 * PLAN.short)
    up = grid.ledger.summary()["payload_up"] / (2 * NODES)
    assert 4 * count < up <= 4 * count + 40
    down = grid.ledger.summary()["payload_down"] / (2 * NODES)
    carriers = 4 * 5 * (40 + 30)
    assert 4 * SIZE + carriers < down < 4 * SIZE + carriers + 400


def test_nothing_but_the_update_leaves_a_client() -> None:
    seen: list[RecordDict] = []

    def watching(msg: Message, context: Context) -> Message:
        reply = inner(msg, context)
        seen.append(reply.content)
        return reply

    inner = app()
    run(strategy(), client=watching)
    assert len(seen) == NODES
    for content in seen:
        assert set(content) == {"fedcomp.node"}
        assert set(content["fedcomp.node"]) == {"partition-id", "sequence", "record", FRAME + "values"}


def test_the_apps_own_message_is_an_ordinary_one() -> None:
    """The mod takes what is its own off the message: an app that reads all records meets none of it."""
    seen: list[set[str]] = []
    inner = client_app(
        [compression(), private(), lambda msg, ctx, nxt: (seen.append(set(msg.content)), nxt(msg, ctx))[1]]
    )
    run(strategy(), client=inner)
    assert seen == [{"arrays", "config"}] * NODES


def test_a_client_without_the_mod_is_shortened_by_the_server() -> None:
    modded, *_ = run(strategy(noise_multiplier=1.0))
    plain, with_mod = client_app([private()]), app()
    mixed = by_partition(lambda partition: plain if partition in (1, 4) else with_mod)
    chosen = strategy(noise_multiplier=1.0)
    moved, *_ = run(chosen, client=mixed)
    np.testing.assert_array_equal(moved, modded)
    assert (chosen.reports[1].plain, chosen.reports[1].compressed) == (2, 6)


@pytest.mark.slow
def test_2_6_what_is_asked_is_independent_of_the_data_and_another_in_every_round() -> None:
    """Of the first round, before models differ; which coordinates are kept follows from the seed and the round."""
    asked: list[list[bytes]] = []
    for shift in (0.0, 100.0):
        seen: list[bytes] = []

        def watching(msg: Message, context: Context, seen: list = seen, shift: float = shift) -> Message:
            if context.node_config["partition-id"] == 0:
                seen.append(data_in(msg.content, FRAME)["carriers"])
            return client_app([compression(), private(), shifting(shift)])(msg, context)

        run(strategy(schedule="linear", schedule_rounds=4, keep=0.25), rounds=2, client=watching)
        asked.append(seen)
    assert asked[0][0] == asked[1][0] != asked[0][1]
    system = LowRank(clip=CLIP, rank=5, keep=0.25, schedule="linear", schedule_rounds=4)
    drawn = [system.drawn(PLAN.short, number, 7) for number in range(1, 5)]
    assert [round(each.size / PLAN.short, 2) for each in drawn] == [1.0, 0.75, 0.5, 0.25]
    constant = LowRank(clip=CLIP, rank=5, keep=0.25)
    assert not np.array_equal(constant.drawn(PLAN.short, 4, 7), constant.drawn(PLAN.short, 3, 7))


def shifting(shift: float):
    def mod(msg: Message, context: Context, call_next: App) -> Message:
        reply = call_next(msg, context)
        record = {k: Array(v.numpy() + np.float32(shift)) for k, v in reply.content["arrays"].items()}
        reply.content["arrays"] = ArrayRecord(record)
        return reply

    return mod


@pytest.mark.slow
def test_noisy_magnitude_sends_its_mask_and_learns_where_it_learnt() -> None:
    chosen = strategy(mask="noisy_magnitude", keep=0.2, noise_multiplier=0.5)
    moved, _, grid = run(chosen, rounds=4)
    _, _, random = run(strategy(keep=0.2, noise_multiplier=0.5), rounds=4)
    assert np.isfinite(moved).all()
    assert all(report.compressed == NODES for report in chosen.reports.values())
    # The mask costs bytes down and none up.
    assert grid.ledger.summary()["payload_up"] == random.ledger.summary()["payload_up"]
    assert grid.ledger.summary()["payload_down"] > random.ledger.summary()["payload_down"]


@pytest.mark.slow
def test_a_history_makes_carriers_of_the_way_the_model_went() -> None:
    plain, *_ = run(strategy(noise_multiplier=0.5), rounds=3)
    chosen = strategy(noise_multiplier=0.5, history=1)
    moved, *_ = run(chosen, rounds=3)
    assert not np.array_equal(moved, plain)
    assert np.isfinite(moved).all()


# Hostile clients.


COUNT = math.ceil(0.5 * PLAN.short)


def test_an_update_that_is_not_finite_is_answered_with_an_error_that_tells_nothing() -> None:
    chosen = strategy(noise_multiplier=1.0)
    run(chosen, client=client_app([compression(), private(), shifting(math.nan)]))
    assert len(chosen.reports[1].refused) == NODES
    assert all("stays on the node" in reason for reason in chosen.reports[1].refused.values())
    assert chosen.privacy.releases == 1


# The client's half.


LAYOUT = Layout.of({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})


def short_of(frames: dict[str, bytes], system: LowRank = LowRank(clip=CLIP, rank=5, keep=0.5)) -> np.ndarray:  # noqa: B008
    """Return what a client answers to an ask with these frames."""
    made = Update(np.arange(LAYOUT.size, dtype=np.float32), LAYOUT)
    me = Me(0, 1, 7, LAYOUT, lambda: np.zeros(LAYOUT.size, np.float32), lambda whole, collect: made)
    _, answer = system.client({}, Ask(0, frames=frames), me)
    return Identity().decode(answer.frames["values"], Layout.flat(system.released(LAYOUT, 1).size))


def test_carriers_and_kept_coordinates_arrive_as_they_were_sent_or_not_at_all() -> None:
    carriers = carried(PLAN.carriers(flat(start()), Key(7, "carriers")))
    assert short_of(carriers).size == COUNT
    with pytest.raises(AnswerError, match="carriers"):
        short_of({})
    with pytest.raises(wire.WireError):
        short_of({"carriers": wire.encode([wire.dense(np.zeros((40, 5), np.float32))])})
    for count in (COUNT - 1, COUNT + 3):
        frame = wire.encode([wire.sparse((PLAN.short,), np.arange(count), wire.Ones(count))])
        with pytest.raises((AnswerError, wire.WireError)):
            short_of({**carriers, "kept": frame})
    named = wire.encode([wire.sparse((PLAN.short,), np.arange(COUNT), wire.Ones(COUNT))])
    assert not np.array_equal(short_of({**carriers, "kept": named}), short_of(carriers))


def test_what_a_client_sends_is_clipped_as_a_whole_and_after_the_mask() -> None:
    system = LowRank(clip=1.0, rank=0, keep=0.5)
    sent = short_of({}, system).astype(np.float64)
    kept = np.arange(LAYOUT.size)[system.drawn(LAYOUT.size, 1, 7)]
    np.testing.assert_allclose(sent, kept / np.linalg.norm(kept), rtol=1e-5)


# What survives, and what is refused.


@pytest.mark.slow
def test_a_resumed_run_is_the_run_and_other_settings_are_refused() -> None:
    settings = {"noise_multiplier": 1.0, "history": 1}
    whole, *_ = run(strategy(**settings), rounds=3)
    first = strategy(**settings)
    _, half, _ = run(first, rounds=2)
    second = strategy(**settings)
    second.load_state_dict(first.state_dict())
    assert second.privacy.releases == 2
    with InProcessGrid(app(), NODES, seed=3) as grid:
        sent = list(second.configure_train(3, half.arrays, ConfigRecord({"server-round": 3}), grid))
        arrays, _ = second.aggregate_train(3, list(grid.send_and_receive(sent, timeout=9)))
    np.testing.assert_array_equal(flat(arrays), whole)
    for changed in ({"rank": 4}, {"keep": 0.4}, {"clip": 1.0}, {"whole_tensors": "w*"}):
        with pytest.raises(StateError):
            strategy(**{**settings, **changed}).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("build", "words"),
    [(lambda: strategy(schedule="cosine"), "schedule"), (lambda: run(Compressed(strategy(), TopK(0.1))), "Compressed")],
)
def test_what_cannot_be_promised_is_refused(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build()


def test_a_layout_of_the_server_and_of_the_client_is_one() -> None:
    """Small tensors stand behind large ones in the vector, whatever their order in the model: both sides agree."""
    layout = Layout.of({"bias": np.zeros(12, np.float32), "weight": np.zeros((40, 30), np.float32)})
    assert [p.name for p in LowRank(clip=1.0, rank=5).plan(layout).pieces] == ["weight", "bias"]
