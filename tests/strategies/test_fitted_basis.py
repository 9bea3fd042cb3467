"""GradiVeQ over messages (test list A7 of the transform compressors, by number where a server is needed)."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from toy import client_app, fedavg, fingerprint, model, stack
from waiting_runs import Sent, number_of

from fedcomp.clients.memory import BLOB
from fedcomp.clients.programs import programs
from fedcomp.codecs import GradiVeQ, PowerSGD, TopK
from fedcomp.codecs.cycle import Cycle
from fedcomp.codecs.subspace import SliceBasis
from fedcomp.errors import ConfigError
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD, has_frame, put_frame, take_frame
from fedcomp.flower.payload import frames as passed
from fedcomp.flower.rounds import fit
from fedcomp.layout import Layout
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.gradiveq import FittedBasis

SIZE = 1212
VALUES = FRAME + "values"
LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()})
WIDTH = 47
"""25 slices and a tail of 25 of the toy's matrix of 1200; 12 biases travel dense."""
PHASES = {"sampling": 4, "compression": 3}


def codec(**options) -> GradiVeQ:
    return GradiVeQ(**{"width": WIDTH, "loss": 0.3, **options})


def app() -> ClientApp:
    return client_app([programs()])


def metered(nodes: int, *, fault=None, client=None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(client or app(), nodes, seed=4, fault=fault, **options), TrafficLedger())


class Watched(FittedBasis):
    """Keeps per round the mean, what was summed by which codec, the basis, and which nodes were asked again."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **{**PHASES, **options})
        self.means: dict[int, np.ndarray] = {}
        self.given: dict[int, tuple] = {}
        self.bases: dict[int, SliceBasis] = {}
        self.again: dict[int, list[int]] = {}

    def _ask(self, server_round, *args):
        self.again[server_round], self.asked = [], set()
        return super()._ask(server_round, *args)

    def _message(self, x, now, ask):
        if ask.node in self.asked:
            self.again[now.number].append(ask.node)
        self.asked.add(ask.node)
        return super()._message(x, now, ask)

    def _take(self, x, now, step):
        out = super()._take(x, now, step)
        if out[0] is not None:
            codec, given = self.given[now.number] = x.given
            self.bases[now.number] = self.system._basis(step.blobs, LAYOUT)
            total = sum(each.weight for each in given)
            self.means[now.number] = sum(each.weight / total * codec.decode(each.frame, LAYOUT) for each in given)
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
    average = strategy.inner.evaluate_metrics_aggr_fn

    def look(replies, weighted_by):
        seen.append({reply["metrics"]["seen"] for reply in replies})
        return average(replies, weighted_by)

    strategy.inner.evaluate_metrics_aggr_fn = look
    result, _ = run(strategy)
    np.testing.assert_allclose(stack(result.arrays), sum(strategy.means.values()), rtol=1e-4, atol=0.2)
    assert all(len(models) == 1 for models in seen)
    assert seen[-1] == {fingerprint(result.arrays)}
    assert [bool(basis.subspaces) for basis in strategy.bases.values()] == [False] * 4 + [True] * 3 + [False] * 2
    for report in strategy.reports.values():
        assert (report.used, report.refused) == (4, {})
    noted = {number: report.notes for number, report in strategy.reports.items() if report.notes}
    assert list(noted) == [4], "the fit is said, and nothing else"


@pytest.mark.parametrize("gone", [(), (0,), (1, 3), (0, 1, 2)])
@pytest.mark.parametrize("center", [True, False])
def test_1_any_subset_of_clients_gives_the_projection_of_its_mean(gone: tuple[int, ...], center: bool) -> None:
    """Clients that vanish leave no share of the basis's mean behind: what arrives is exact for those that stay."""

    def fault(delivery: Delivery):
        return "offline" if delivery.round >= 5 and delivery.partition in gone else None

    strategy = Watched(codec(center=center))
    run(strategy, rounds=6, fault=fault)
    assert [strategy.reports[n].used for n in (5, 6)] == [4 - len(gone)] * 2
    basis = strategy.bases[5]
    for number in (5, 6):
        fixed, given = strategy.given[number]
        total, mean = sum(each.weight for each in given), np.zeros(basis.size)
        for each in given:
            tensors = fixed.open(each.frame, LAYOUT).tensors
            mean += each.weight / total * np.concatenate([t.values.decode() for t in tensors])
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


def test_8_a_basis_travels_once_to_each_node_and_the_ledger_counts_it() -> None:
    grid = Sent(metered(3))
    strategy = Watched(codec(), fraction_evaluate=1.0)
    strategy.start(grid, model(), num_rounds=8, timeout=9)
    assert grid.holding("blob") == [(5, "train")] * 3
    ledger = grid.inner.ledger
    down = {n: ledger.total("payload", round=n, direction="down", message_type="train") for n in (5, 6)}
    once = 3 * len(strategy.state["basis"])
    assert once <= down[5] - down[6] < once + 300
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
    """In the same round, before it trains: nobody is left out."""

    def forget(context: Context, name: str) -> None:
        del context.state[name]

    def damage(context: Context, name: str) -> None:
        frame = bytearray(take_frame(context.state, name))
        frame[-5] ^= 1
        put_frame(context.state, name, bytes(frame))

    for spoil in (forget, damage):
        for options in ({}, {"levels": 15}):
            honest, strategy = app(), Watched(codec(**options), fraction_evaluate=1.0)

            def client(msg: Message, context: Context, spoil=spoil, honest=honest, spoilt=[]) -> Message:  # noqa: B006
                asked = (number_of(msg), context.node_config["partition-id"], msg.metadata.message_type)
                if asked == (6, 1, "train") and not spoilt:
                    spoilt.extend(name for name in context.state if name.startswith(BLOB))
                    for name in spoilt:
                        spoil(context, name)
                return honest(msg, context)

            run(strategy, 3, client=client, rounds=8)
            assert [report.used for report in strategy.reports.values()] == [3] * 8
            assert strategy.again[6] == ([1, 0, 1, 2] if options else [1])
            assert not any(report.refused for report in strategy.reports.values())


def test_8_a_stale_basis_is_rejected_and_its_frame_goes_back_into_the_memory() -> None:
    """Coefficients in the basis of the cycle before, under whatever name, are never summed."""
    kept: list[bytes] = []
    honest = app()

    def cheat(msg: Message, context: Context) -> Message:
        reply = honest(msg, context)
        if context.node_config["partition-id"] == 1 and reply.has_content() and has_frame(reply.content, VALUES):
            frame = take_frame(reply.content, VALUES)
            assert frame is not None
            if number_of(msg) == 5:
                kept.append(frame)
            if number_of(msg) == 12:
                reply.content[NODE_RECORD] = ConfigRecord({**reply.content[NODE_RECORD], VALUES: kept[0]})
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
    assert 10 * dense / sum(sent) == pytest.approx(Cycle(0, 4, 6).average_ratio(dense / short), rel=1e-12)
    # What comes down after the first model is as short as what goes up.
    down = [grid.ledger.total("payload", round=n, direction="down", message_type="train") / 3 for n in (7, 8)]
    assert all(abs(nbytes - short) < 60 for nbytes in down)


def test_two_exchanges_bring_grids_that_all_share() -> None:
    strategy, frames = Watched(codec(levels=15)), []
    honest = app()

    def look(msg: Message, context: Context) -> Message:
        if msg.metadata.message_type == "query":
            frames.append(passed(msg.content)[FRAME + "steps"])
        return honest(msg, context)

    grid = Sent(metered(3, client=look))
    strategy.start(grid, model(), num_rounds=7, timeout=9)
    assert strategy.again == {1: [], 2: [], 3: [], 4: [], 5: [0, 1, 2], 6: [0, 1, 2], 7: [0, 1, 2]}
    assert {kind for number, kind, _, _ in grid.messages if number < 5} == {"train"}
    assert len(set(frames)) == 3, "one frame a round, the same for all"


def test_a_model_that_was_changed_between_rounds_is_sent_whole_and_the_basis_serves_on() -> None:
    strategy = Watched(codec())
    grid = Sent(metered(3))
    result = fit(strategy, grid, model(), 5, timeout=9)
    moved = ArrayRecord({name: Array(array.numpy() + 1) for name, array in result.arrays.items()})
    fit(strategy, grid, moved, 6, start_round=6, timeout=9)
    assert all(keys == {"arrays"} for number, _, _, keys in grid.messages if number == 6)
    assert strategy.reports[6].used == 3
    assert strategy.bases[6].id == strategy.bases[5].id


def test_a_model_without_slices_travels_as_it_is_and_that_is_said() -> None:
    wide = FittedBasis(GradiVeQ(width=5000), sampling=3, compression=2)
    result, _ = run(wide, 2, rounds=5)
    assert all("everything travels" in r.notes[0] for n, r in wide.reports.items() if n == 1)
    assert np.abs(stack(result.arrays)).max() > 0


def test_clients_of_other_systems_are_served_beside_it() -> None:
    """One app answers all kinds; a client without the half is named and left out."""
    every = client_app([programs()])
    result, _ = run(FittedBasis(codec(), **PHASES), 2, client=every)
    assert np.abs(stack(result.arrays)).max() > 0
    lacking = client_app()

    def client(msg: Message, context: Context) -> Message:
        return (lacking if context.node_config["partition-id"] == 0 else every)(msg, context)

    strategy = FittedBasis(codec(), **PHASES)
    run(strategy, 3, client=client, rounds=2)
    (reason,) = strategy.reports[1].refused.values()
    assert "its app cannot take part in FittedBasis" in reason


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
    assert all("blob" in keys or "arrays" in keys for keys in back)
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
