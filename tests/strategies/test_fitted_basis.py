"""GradiVeQ over messages (test list A7 of the transform compressors, by number where a server is needed)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from toy import client_app, fedavg, fingerprint, model, stack
from waiting_runs import Sent, number_of, owed

from fedcomp.clients.compressed import compression
from fedcomp.clients.gradiveq import fitted_basis
from fedcomp.clients.programs import programs
from fedcomp.codecs import GradiVeQ, PowerSGD, TopK
from fedcomp.codecs.cycle import COMPRESSION, SAMPLING
from fedcomp.codecs.gradiveq import steps_frame
from fedcomp.codecs.subspace import SliceBasis
from fedcomp.errors import ConfigError, StateError
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import NODE_RECORD, has_frame, put_frame, take_frame
from fedcomp.flower.protocol import PROBE, SUPPORT, UPDATE
from fedcomp.flower.rounds import drive, fit
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gradiveq import FittedBasis

SIZE = 1212
LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()})
WIDTH = 47
"""25 slices and a tail of 25 of the toy's matrix of 1200; 12 biases travel dense."""
PHASES = {"sampling": 4, "compression": 3}


def codec(**options) -> GradiVeQ:
    return GradiVeQ(**{"width": WIDTH, "loss": 0.3, **options})


def app() -> ClientApp:
    return client_app([fitted_basis(), compression()])


def metered(nodes: int, *, fault=None, client=None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(client or app(), nodes, seed=4, fault=fault, **options), TrafficLedger())


class Watched(FittedBasis):
    """Keeps per partition what was delivered, per round the mean, the basis, and which nodes were asked again."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **{**PHASES, **options})
        self.delivered: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
        self.means: dict[int, np.ndarray] = {}
        self.bases: dict[int, SliceBasis] = {}
        self.again: dict[int, list[int]] = {}

    def _gather(self, now, frames):
        self.again[now.number] = sorted(c.partition for c in now.clients if c.values is None)
        yield from super()._gather(now, frames)

    def _aggregate(self, now):
        out = super()._aggregate(now)
        if out[0] is not None:
            self.bases[now.number] = now.basis
            found = {c.partition: (c.weight, now.fixed.decode(c.values, LAYOUT).astype(float)) for c in now.senders}
            for partition, (_, vector) in found.items():
                self.delivered[partition] += vector
            total = sum(weight for weight, _ in found.values())
            self.means[now.number] = sum(weight / total * vector for weight, vector in found.values())
        return out


def run(strategy: FittedBasis, nodes: int = 4, rounds: int = 9, **options):
    grid = metered(nodes, **options)
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9), grid


VARIANTS = [
    {},
    {"center": True},
    {"basis": "per_slice", "most": 2},
    {"values": "q8"},
    {"levels": 127},
    {"memory": True},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_1_the_model_moves_by_the_weighted_mean_of_what_was_decoded_and_all_hold_it(options: dict) -> None:
    """Decoded once from summed coefficients, with FedAvg's weights; every replica is the server's model."""
    strategy = Watched(codec(**options), fraction_evaluate=1.0)
    seen: list[set[float]] = []
    average = strategy.cohort.evaluate_metrics_aggr_fn

    def look(replies, weighted_by):
        seen.append({reply["metrics"]["seen"] for reply in replies})
        return average(replies, weighted_by)

    object.__setattr__(strategy.cohort, "evaluate_metrics_aggr_fn", look)
    result, _ = run(strategy)
    np.testing.assert_allclose(stack(result.arrays), sum(strategy.means.values()), rtol=1e-4, atol=0.2)
    assert all(len(models) == 1 for models in seen)
    assert seen[-1] == {fingerprint(result.arrays)}
    assert [bool(basis.subspaces) for basis in strategy.bases.values()] == [False] * 4 + [True] * 3 + [False] * 2
    for report in strategy.reports.values():
        assert (report.used, report.refused, report.notes) == (4, {}, [])


@pytest.mark.parametrize("gone", [(), (0,), (1, 3), (0, 1, 2)])
@pytest.mark.parametrize("center", [True, False])
def test_1_any_subset_of_clients_gives_the_projection_of_its_mean(gone: tuple[int, ...], center: bool) -> None:
    """Clients that vanish leave no share of the basis's mean behind: what arrives is exact for those that stay."""

    def fault(delivery: Delivery):
        return "offline" if delivery.round >= 5 and delivery.partition in gone else None

    strategy = Watched(codec(center=center))
    updates: dict[int, dict[int, tuple[float, np.ndarray]]] = defaultdict(dict)
    taken = strategy.ROUND.take_values

    class Round(strategy.ROUND):  # type: ignore[name-defined]
        def take_values(self, client, reply):
            taken(self, client, reply)
            updates[self.number][client.partition] = client.weight, reply

    strategy.ROUND = Round
    run(strategy, rounds=6, fault=fault)
    assert [strategy.reports[n].used for n in (5, 6)] == [4 - len(gone)] * 2
    basis = strategy.bases[5]
    for number in (5, 6):
        found = updates[number].values()
        total = sum(weight for weight, _ in found)
        mean = np.zeros(basis.size)
        for weight, reply in found:
            bundle = strategy.codec.on(basis).open(take_frame(reply.content, UPDATE), LAYOUT)
            mean += weight / total * np.concatenate([t.values.decode() for t in bundle.tensors])
        expected = basis.reconstruct(mean.astype(np.float32)) if basis.slices.parts else mean
        off = np.linalg.norm(strategy.means[number] - expected) / np.linalg.norm(expected)
        assert off < 1e-6


def test_2_a_full_basis_is_the_uncompressed_run() -> None:
    """d = K: the whole trajectory of FedAvg, to float tolerance."""
    full = Watched(codec(width=30, loss=1e-9))
    result, _ = run(full, rounds=8)
    assert full.bases[5].dimensions == (30,)
    plain = fedavg(fraction_evaluate=0.0).start(metered(4), model(), num_rounds=8, timeout=9)
    np.testing.assert_allclose(stack(result.arrays), stack(plain.arrays), rtol=1e-5, atol=0.05)


def test_5_tails_and_small_tensors_arrive_bit_for_bit_in_every_phase() -> None:
    """The toy's updates are integers: a tail that was rounded or projected would not be."""
    for options in ({}, {"values": "q8"}, {"levels": 15}):
        strategy = Watched(codec(**options))
        run(strategy, 1, rounds=7)
        for number, mean in strategy.means.items():
            rest = mean[25 * WIDTH : 1200]
            np.testing.assert_array_equal(rest, np.round(rest), err_msg=str(number))


def test_8_a_basis_travels_once_to_each_node_and_the_ledger_counts_it() -> None:
    grid = Sent(metered(3))
    strategy = Watched(codec(), fraction_evaluate=1.0)
    strategy.start(grid, model(), num_rounds=8, timeout=9)
    # With the evaluation after the fit; training in the round that follows has it already.
    assert grid.holding(SUPPORT) == [(4, "evaluate")] * 3
    ledger = grid.inner.ledger
    down = {n: ledger.total("payload", round=n, direction="down", message_type="evaluate") for n in (3, 4)}
    assert 3 * len(strategy._frame) <= down[4] - down[3] < 3 * len(strategy._frame) + 300
    assert all(again == [] for again in strategy.again.values())


def test_8_without_evaluation_the_basis_comes_with_the_first_training_message() -> None:
    grid = Sent(metered(3))
    strategy = Watched(codec())
    strategy.start(grid, model(), num_rounds=7, timeout=9)
    assert grid.holding(SUPPORT) == [(5, "train")] * 3
    assert all(again == [] for again in strategy.again.values())


@pytest.mark.parametrize("options", [{}, {"levels": 15}], ids=str)
def test_8_a_joining_client_works_in_its_first_round(options: dict) -> None:
    strategy = Watched(codec(**options))
    grid = metered(3)
    half = fit(strategy, grid, model(), 5, timeout=9)
    grid.inner.add_node(3)
    fit(strategy, grid, half.arrays, 8, start_round=6, timeout=9)
    assert [strategy.reports[n].used for n in (5, 6, 7, 8)] == [3, 4, 4, 4]
    assert not any(report.refused for report in strategy.reports.values())
    assert strategy.again[6] == ([] if not options else [0, 1, 2, 3])


def test_8_a_node_that_lost_or_damaged_its_basis_is_sent_it_again() -> None:
    def forget(context: Context) -> None:
        del context.state["fedcomp.gradiveq"]

    def damage(context: Context) -> None:
        held = context.state["fedcomp.gradiveq"]["basis"].numpy().copy()
        held[-5] ^= 1
        context.state["fedcomp.gradiveq"] = ArrayRecord({"basis": Array(held)})

    for spoil in (forget, damage):
        for options in ({}, {"levels": 15}):
            honest, strategy = app(), Watched(codec(**options), fraction_evaluate=1.0)

            def client(msg: Message, context: Context, spoil=spoil, honest=honest) -> Message:
                asked = (number_of(msg), context.node_config["partition-id"], msg.metadata.message_type)
                if asked == (6, 1, "train"):
                    spoil(context)
                return honest(msg, context)

            run(strategy, 3, client=client, rounds=8)
            used = [report.used for report in strategy.reports.values()]
            if options:
                # It could not say how large its coefficients are: one round without it, and that is said.
                assert used == [3, 3, 3, 3, 3, 2, 3, 3]
                (reason,) = strategy.reports[6].refused.values()
                assert "lacked the basis" in reason
            else:
                assert used == [3] * 8
                assert strategy.again[6] == [1]
            assert not any(report.refused for report in list(strategy.reports.values())[6:])


def test_8_a_stale_basis_is_rejected_and_its_frame_goes_back_into_the_memory() -> None:
    """Coefficients in the basis of the cycle before, under whatever name, are never summed."""
    kept: list[bytes] = []
    honest = app()

    def cheat(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if context.node_config["partition-id"] == 1 and reply.has_content() and has_frame(reply.content, UPDATE):
            frame = take_frame(reply.content, UPDATE)
            assert frame is not None
            if number_of(msg) == 5:
                kept.append(frame)
            if number_of(msg) == 12:
                put_frame(reply.content, UPDATE, kept[0])
        return reply

    strategy = Watched(codec(memory=True))
    grid = metered(3, client=cheat)
    strategy.start(grid, model(), num_rounds=13, timeout=9)
    assert strategy.bases[5].id != strategy.bases[12].id
    (reason,) = strategy.reports[12].refused.values()
    assert "two bases do not add" in reason
    assert strategy.reports[12].used == 2
    assert strategy.reports[13].rolled_back == [grid.inner.node_id_of(1)]
    assert strategy.reports[13].used == 3


@pytest.mark.parametrize("at", [2, 4, 5, 6, 7])
@pytest.mark.parametrize("options", [{}, {"center": True, "memory": True}, {"levels": 15}], ids=str)
def test_8_a_resumed_run_goes_on_bit_for_bit_in_every_phase(at: int, options: dict, tmp_path: Path) -> None:
    """Phase, sums, basis and who holds it are in the checkpoint."""
    whole = Watched(codec(**options))
    result, _ = run(whole, 3, rounds=10)
    first, grid = Watched(codec(**options)), metered(3)
    half = fit(first, grid, model(), at, timeout=9)
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, server_round=at, arrays=half.arrays, strategy=first, grid=grid)
    held, second = checkpoint.load(path), Watched(codec(**options))
    held.apply(second, grid)
    sent = Sent(grid)
    again = fit(second, sent, held.arrays, 10, start_round=at + 1, timeout=9)
    np.testing.assert_array_equal(stack(result.arrays), stack(again.arrays))
    assert sent.holding(SUPPORT) == ([(5, "train")] * 3 if at < 5 else [])
    other = Watched(codec(**options), sampling=5)
    with pytest.raises(StateError):
        other.load_state_dict(first.state_dict())


def test_9_bytes_of_a_cycle_are_those_of_the_formula() -> None:
    """From real payload lengths: dense rounds, coefficients and the rest, headers and all."""
    strategy = Watched(codec(), sampling=4, compression=6)
    _, grid = run(strategy, 3, rounds=10)
    sent = [grid.ledger.total("payload", round=n, direction="up", message_type="train") / 3 for n in range(1, 11)]
    dense, short = sent[0], sent[4]
    assert sent == [dense] * 4 + [short] * 6
    basis = strategy.bases[5]
    assert 4 * SIZE < dense < 4 * SIZE + 120
    assert 4 * basis.size < short < 4 * basis.size + 120
    assert 10 * dense / sum(sent) == pytest.approx(strategy.cycle.average_ratio(dense / short), rel=1e-12)
    # What comes down after the first model is as short as what goes up.
    down = [grid.ledger.total("payload", round=n, direction="down", message_type="train") / 3 for n in (7, 8)]
    assert all(abs(nbytes - short) < 60 for nbytes in down)


def test_drift_ends_a_basis_early_and_nobody_s_word_counts_for_more_than_its_weight() -> None:
    strategy = Watched(codec(refresh_tol=0.9))
    run(strategy, rounds=7)
    assert all(not report.notes for report in strategy.reports.values())
    nervous = Watched(codec(refresh_tol=1e-6))
    result, _ = run(nervous, rounds=10)
    dense = [not basis.subspaces for basis in nervous.bases.values()]
    assert dense == [True] * 4 + [False] + [True] * 4 + [False]
    assert ["sampling begins again" in "".join(nervous.reports[n].notes) for n in (4, 5, 6, 10)] == [
        False,
        True,
        False,
        True,
    ]
    assert 0.0 < result.train_metrics_clientapp[5]["basis-drift"] < 1.0
    honest = app()

    def loud(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if context.node_config["partition-id"] == 0 and has_frame(reply.content, UPDATE):
            reply.content[NODE_RECORD]["drift"] = 1e300
        return reply

    # One of four, with the smallest weight of all.
    calm = Watched(codec(refresh_tol=0.9))
    run(calm, rounds=7, client=loud)
    assert [bool(basis.subspaces) for basis in calm.bases.values()] == [False] * 4 + [True] * 3


def test_rounds_without_a_step_are_counted_for_nothing() -> None:
    def fault(delivery: Delivery):
        return "offline" if delivery.round in (2, 6) else None

    strategy = Watched(codec())
    run(strategy, rounds=10, fault=fault)
    assert sorted(strategy.bases) == [1, 3, 4, 5, 7, 8, 9, 10]
    assert [bool(strategy.bases[n].subspaces) for n in (5, 7, 8, 9, 10)] == [False, True, True, True, False]


def test_two_exchanges_bring_grids_that_all_share() -> None:
    strategy, frames = Watched(codec(levels=15)), []
    honest = app()

    def look(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type == "query":
            frames.append(take_frame(msg.content, PROBE))
        return honest(msg, context)

    grid = Sent(metered(3, client=look))
    strategy.start(grid, model(), num_rounds=7, timeout=9)
    assert strategy.again == {1: [], 2: [], 3: [], 4: [], 5: [0, 1, 2], 6: [0, 1, 2], 7: [0, 1, 2]}
    assert {kind for number, kind, _, _ in grid.messages if number < 5} == {"train"}
    assert all(keys == {PROBE} for _, kind, _, keys in grid.messages if kind == "query")
    assert len(set(frames)) == 3, "one frame a round, the same for all"


@pytest.mark.parametrize(
    ("peaks", "said"),
    [(np.float32([-1.0]), "negative"), (np.float32([1.0, 2.0]), ""), (np.float32([np.inf]), "finite")],
)
def test_peaks_that_cannot_be_are_refused(peaks: np.ndarray, said: str) -> None:
    honest = app()

    def cheat(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if context.node_config["partition-id"] == 1 and PROBE in reply.content:
            put_frame(reply.content, PROBE, steps_frame(peaks))
        return reply

    strategy = Watched(codec(levels=15))
    run(strategy, 3, client=cheat, rounds=6)
    (reason,) = strategy.reports[5].refused.values()
    assert said in reason
    assert strategy.reports[5].used == 2


def test_a_model_that_was_changed_between_rounds_and_one_of_other_tensors() -> None:
    strategy = Watched(codec())
    grid = Sent(metered(3))
    result = fit(strategy, grid, model(), 5, timeout=9)
    moved = ArrayRecord({name: Array(array.numpy() + 1) for name, array in result.arrays.items()})
    fit(strategy, grid, moved, 6, start_round=6, timeout=9)
    assert all(keys == {"arrays", SUPPORT} for number, _, _, keys in grid.messages if number == 6)
    assert strategy.reports[6].used == 3
    assert strategy.cycle.phase == COMPRESSION
    larger = ArrayRecord({**moved, "more": Array(np.zeros((40, 40), np.float32))})
    strategy.announcer.adopt(larger, strategy.codec, updates_only=False)
    layout = strategy.announcer.layout
    report = strategy.reports[6]
    strategy._fit_to(layout, report)
    assert "sampling begins again" in report.notes[-1]
    assert strategy.cycle.phase == SAMPLING
    # No tensor has two slices.
    wide = FittedBasis(GradiVeQ(width=5000), sampling=3, compression=2)
    result, _ = run(wide, 2, rounds=5)
    assert all("everything travels" in r.notes[0] for n, r in wide.reports.items() if n == 1)
    assert np.abs(stack(result.arrays)).max() > 0


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"levels": 127}, {"center": True}], ids=str)
@pytest.mark.parametrize("error_state", ["discard", pytest.param("keep", marks=pytest.mark.long)])
def test_conservation_under_faults(options: dict, error_state: str) -> None:
    """With the memory on: 6 clients, 50 rounds, every kind of message lost, duplicated, late, crashed or damaged,
    nodes wiped: for every life of every node, updates made = delivered + owed, elementwise."""
    plan = RandomFaults(
        Key(11, "faults"), {"lost_reply": 0.1, "duplicate": 0.1, "late": 0.1, "raise": 0.1, "corrupt": 0.02}, pushes=1
    )
    grid = InProcessGrid(app(), 6, seed=5, fault=plan, error_state=error_state)
    strategy = Watched(codec(memory=True, **options), compression=8)
    arrays = model()
    made: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    left: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    nodes = list(grid.get_node_ids())
    partition = {n: int(grid.context(n).node_config["partition-id"]) for n in nodes}

    def settle(node: int) -> None:
        context = grid.context(node)
        if "toy.sum" in context.state:
            made[partition[node]] += context.state.array_records["toy.sum"]["sum"].numpy()
        left[partition[node]] += owed(context, strategy, node, LAYOUT)

    for round_ in range(1, 51):
        new, _ = drive(strategy.round(round_, arrays, ConfigRecord(), grid), grid, timeout=9)
        arrays = new if new is not None else arrays
        if round_ in (13, 29):
            settle(nodes[round_ % 6])
            grid.wipe(nodes[round_ % 6])
    for node in nodes:
        settle(node)
    reports = list(strategy.reports.values())
    assert sum(len(r.rolled_back) for r in reports) > 10
    assert sum(bool(basis.subspaces) for basis in strategy.bases.values()) > 20
    assert sum(r.compressed for r in reports) > 100
    for p in range(6):
        assert np.abs(strategy.delivered[p] + left[p] - made[p]).max() < 0.5
        assert np.abs(made[p]).max() > 1000


def test_clients_of_other_systems_are_served_beside_it() -> None:
    """One app answers all kinds; a client without the half is named and left out."""
    every = client_app([fitted_basis(), programs(), compression()])
    result, _ = run(FittedBasis(codec(), **PHASES), 2, client=every)
    assert np.abs(stack(result.arrays)).max() > 0
    lacking = client_app([compression()])

    def client(msg: Message, context: Context) -> Message:
        return (lacking if context.node_config["partition-id"] == 0 else every)(msg, context)

    strategy = FittedBasis(codec(), **PHASES)
    run(strategy, 3, client=client, rounds=2)
    (reason,) = strategy.reports[1].refused.values()
    assert "fitted_basis()" in reason


def test_partial_participation_and_warm_up() -> None:
    strategy = Watched(codec(), fraction_train=0.5, warmup_rounds=2, fraction_evaluate=1.0)
    result, _ = run(strategy, 6, rounds=12)
    assert [report.used for report in strategy.reports.values()] == [3] * 12
    assert [bool(b.subspaces) for b in strategy.bases.values()] == [False] * 6 + [True] * 3 + [False] * 3
    assert all(not evaluation.refused for evaluation in strategy.evaluations.values())
    np.testing.assert_allclose(stack(result.arrays), sum(strategy.means.values()), rtol=1e-4, atol=0.1)


def test_a_node_that_was_away_reads_steps_of_the_last_basis_after_its_end() -> None:
    """It held no basis; one round of the next sampling is all that it misses."""

    def away(delivery: Delivery):
        return "offline" if delivery.partition == 2 and delivery.round in (5, 6) else None

    strategy = Watched(codec(), compression=2)
    grid = Sent(metered(3, fault=away))
    strategy.start(grid, model(), num_rounds=8, timeout=9)
    node = grid.inner.inner.node_id_of(2)
    back = [keys for number, _, to, keys in grid.messages if (number, to) == (7, node)]
    # Steps in the basis and the basis with them, or the model as a whole: never a step that it cannot read.
    assert all(SUPPORT in keys or "arrays" in keys for keys in back)
    assert [strategy.reports[n].used for n in range(1, 9)] == [3, 3, 3, 3, 2, 2, 3, 3]


def test_a_server_step_scales_what_comes_down() -> None:
    whole, _ = run(FittedBasis(codec(), **PHASES), 3, rounds=1)
    half, _ = run(FittedBasis(codec(), server_lr=0.5, **PHASES), 3, rounds=1)
    np.testing.assert_allclose(stack(half.arrays), 0.5 * stack(whole.arrays), rtol=1e-6, atol=1e-4)
    halved, _ = run(FittedBasis(codec(), server_lr=0.5, **PHASES), 3, rounds=7)
    assert np.isfinite(stack(halved.arrays)).all()
    with pytest.raises(ConfigError, match="center"):
        FittedBasis(codec(center=True), server_lr=0.5)


def test_what_a_fitted_basis_does_not_take() -> None:
    for wrong in (PowerSGD(), TopK(0.1)):
        with pytest.raises(ConfigError, match="GradiVeQ"):
            FittedBasis(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 exchanges"):
        Compressed(fedavg(), GradiVeQ())
    for options in ({"sampling": 2}, {"compression": 0}):
        with pytest.raises(ConfigError):
            FittedBasis(**options)
    for options in (
        {"levels": 0},
        {"levels": 7, "values": "q8"},
        {"refresh_tol": 0.0},
        {"refresh_tol": 1.5},
        {"order": "ABCD"},
        {"basis": "x"},
        {"width": 0},
    ):
        with pytest.raises(ConfigError):
            GradiVeQ(**options)
