"""PowerSGD over messages: one basis by its digest, sent again to those that lack it; nothing lost for good."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from program_runs import owed
from toy import client_app, fedavg, fingerprint, model, stack
from waiting_runs import Sent

from fedcomp.clients.client import client as with_halves
from fedcomp.clients.memory import BLOB
from fedcomp.clients.programs import programs
from fedcomp.codecs import LowRank, PowerSGD, ScaleCom, TopK
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.lowrank import Basis
from fedcomp.errors import ConfigError
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import Delivery, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import FRAME, NODE_RECORD, has_frame, put_frame, take_frame
from fedcomp.flower.rounds import drive, fit
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.power_sgd import SharedBasis
from fedcomp.systems.power_sgd import basis_of

SIZE = 1212
VALUES = FRAME + "values"
LAYOUT = Layout.of({name: array.numpy() for name, array in model().items()})
FORMS = ("alternating", "two-exchange")


def app() -> ClientApp:
    return client_app([programs()])


def metered(nodes: int, *, fault=None, client=None, **options) -> MeteredGrid:
    return MeteredGrid(InProcessGrid(client or app(), nodes, seed=4, fault=fault, **options), TrafficLedger())


def run(strategy: SharedBasis, nodes: int = 4, rounds: int = 6, **options):
    grid = metered(nodes, **options)
    return strategy.start(grid, model(), num_rounds=rounds, timeout=9), grid


class Watched(SharedBasis):
    """Keeps per partition what was delivered, per round the mean, and which nodes were asked a second time."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.delivered: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
        self.means: dict[int, np.ndarray] = {}
        self.bases: dict[int, Basis] = {}
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
            self.bases[now.number] = basis_of(self.system.at(now.number), step.blobs, LAYOUT)
            codec, given = x.given
            found = {g.node: (g.weight, codec.decode(g.frame, LAYOUT).astype(float)) for g in given}
            for partition, (_, vector) in found.items():
                self.delivered[partition] += vector
            total = sum(weight for weight, _ in found.values())
            self.means[now.number] = sum(weight / total * vector for weight, vector in found.values())
        return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("values", ["float32", "q8"])
def test_the_model_moves_by_the_mean_of_what_was_decoded_and_all_hold_it(form: str, values: str) -> None:
    """With FedAvg's weights; every replica is the server's model, bit for bit."""
    strategy = Watched(PowerSGD(2, form=form, values=values), fraction_evaluate=1.0)
    seen: list[set[float]] = []
    average = strategy.inner.evaluate_metrics_aggr_fn

    def look(replies, weighted_by):
        seen.append({reply["metrics"]["seen"] for reply in replies})
        return average(replies, weighted_by)

    strategy.inner.evaluate_metrics_aggr_fn = look
    result, _ = run(strategy)
    np.testing.assert_allclose(stack(result.arrays), sum(strategy.means.values()), rtol=1e-4, atol=0.1)
    assert all(len(models) == 1 for models in seen)
    assert seen[-1] == {fingerprint(result.arrays)}
    for report in strategy.reports.values():
        assert (report.used, report.refused, report.notes) == (4, {}, [])


def test_one_exchange_is_enough_and_no_basis_travels_where_steps_do() -> None:
    """The alternating form: from round 2 on a message holds one step, and a reply one frame of factors."""
    grid = Sent(metered(3))
    strategy = Watched(PowerSGD(2))
    strategy.start(grid, model(), num_rounds=5, timeout=9)
    assert list(strategy.again.values()) == [[]] * 5
    assert {kind for _, kind, _, _ in grid.messages} == {"train"}
    for number, _, _, keys in grid.messages:
        # The basis of the first round was drawn, and comes once with the step that is in it.
        assert keys == (
            {"arrays"} if number == 1 else {f"fedcomp.step.{number}"} | ({"blob"} if number == 2 else set())
        )
    sides = [strategy.bases[number].side for number in range(1, 6)]
    assert sides == [1, 0, 1, 0, 1]


def test_two_exchanges_send_a_basis_to_each_and_probe_first() -> None:
    grid = Sent(metered(3))
    strategy = Watched(PowerSGD(2, form="two-exchange"))
    strategy.start(grid, model(), num_rounds=4, timeout=9)
    assert list(strategy.again.values()) == [[0, 1, 2]] * 4
    for number, kind, _, keys in grid.messages:
        # A step of a basis that the node has just sent in does not bring it again.
        step = {f"fedcomp.step.{number}"} if number > 1 else {"arrays"}
        assert keys == (step if kind == "train" else {"blob"})


@pytest.mark.parametrize("memory", ["local", "aggregated"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [1e19, 1e25, 1e38, 3e38])
def test_a_client_is_heard_again_after_an_update_that_overflows(value: float, form: str, memory: str) -> None:
    """Its products overflow float32 in round 2: refused once, by name, and everybody takes part in all other rounds."""

    def app_of(rounds: dict[int, int]) -> ClientApp:
        client = with_halves(ClientApp())

        @client.train()
        def train(msg: Message, context: Context) -> Message:
            node = int(context.node_config["partition-id"])
            rounds[node] = rounds.get(node, 0) + 1
            draws = np.random.default_rng([node, rounds[node]])
            arrays = {name: array.numpy() for name, array in msg.content["arrays"].items()}
            for name, array in arrays.items():
                step = 0.01 * draws.standard_normal(array.shape)
                if node == 0 and rounds[node] == 2:
                    step = np.full(array.shape, value)
                arrays[name] = (array + step).astype(np.float32)
            record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
            metrics = MetricRecord({"num-examples": 1})
            return Message(RecordDict({"arrays": record, "metrics": metrics}), reply_to=msg)

        return client

    strategy = SharedBasis(PowerSGD(2, form=form, memory=memory), fraction_evaluate=0.0)
    result = strategy.start(InProcessGrid(app_of({}), 3, seed=0), model(), num_rounds=6, timeout=9)
    used = [strategy.reports[number].used for number in range(1, 7)]
    assert used == ([3, 2, 3, 3, 3, 3] if value > 1e36 else [3] * 6)
    refused = [text for number in range(1, 7) for text in strategy.reports[number].refused.values()]
    assert len(refused) == (value > 1e36)
    assert all("overflow" in text for text in refused)
    assert all(np.isfinite(array.numpy()).all() for array in result.arrays.values())


@pytest.mark.parametrize("clients", [2, 16])
def test_bytes_of_a_client_do_not_depend_on_the_others(clients: int) -> None:
    strategy = SharedBasis(PowerSGD(2))
    _, grid = run(strategy, clients, rounds=4)
    # 2 columns of 30 or 40 rows, 12 biases, and what frames take.
    for number, rows in ((3, 40), (4, 30)):
        up, down = (
            grid.ledger.total("payload", round=number, direction=way, message_type="train") / clients
            for way in ("up", "down")
        )
        assert 4 * (2 * rows + 12) < up < 4 * (2 * rows + 12) + 120
        # What goes down is the step of the round before, of the other side.
        assert 4 * (2 * (70 - rows) + 12) < down < 4 * (2 * (70 - rows) + 12) + 120


@pytest.mark.parametrize("form", FORMS)
def test_a_node_whose_basis_is_stale_is_sent_it_again_and_takes_part(form: str) -> None:
    """What it kept of the basis is damaged or gone: never a frame of another basis, and no round without it."""

    def forget(context: Context) -> None:
        for key in [key for key in context.state if key.startswith(BLOB)]:
            del context.state[key]

    def damage(context: Context) -> None:
        for key in [key for key in context.state if key.startswith(BLOB)]:
            put_frame(context.state, key, take_frame(context.state, key)[:-1] + b"?")

    for spoil in (forget, damage):
        honest, strategy = app(), Watched(PowerSGD(2, form=form), fraction_evaluate=1.0)

        def client(msg: Message, context: Context, spoil=spoil, honest=honest) -> Message:
            number = int(msg.content.config_records.get("config", {}).get("server-round", 0))
            # It was sent the last step when it evaluated: this round's message brings none.
            if (number, context.node_config["partition-id"], msg.metadata.message_type) == (4, 1, "train"):
                spoil(context)
            return honest(msg, context)

        run(strategy, 3, client=client)
        assert [report.used for report in strategy.reports.values()] == [3] * 6
        assert all(not report.refused for report in strategy.reports.values())
        if form == "alternating":
            assert strategy.again == {1: [], 2: [], 3: [], 4: [1], 5: [], 6: []}


def test_a_node_that_was_away_follows_the_steps_or_is_sent_the_basis_with_the_model() -> None:
    def away(delivery: Delivery):
        return "offline" if delivery.partition == 2 and delivery.round in (3, 4) else None

    strategy = Watched(PowerSGD(2))
    grid = Sent(metered(3, fault=away))
    strategy.start(grid, model(), num_rounds=7, timeout=9)
    node = grid.inner.inner.node_id_of(2)
    (back,) = [keys for number, _, to, keys in grid.messages if (number, to) == (5, node)]
    # The node did not say that it lost anything: three steps, each of which leads to the basis of the next.
    assert back in ({f"fedcomp.step.{v}" for v in (3, 4, 5)} | {"blob"}, {"arrays", "blob"})
    assert [strategy.reports[number].used for number in range(1, 8)] == [3, 3, 2, 2, 3, 3, 3]
    assert all(again == [] for again in strategy.again.values())


@pytest.mark.parametrize("form", FORMS)
def test_a_new_node_and_one_that_lost_its_state_join_at_once(form: str) -> None:
    strategy = Watched(PowerSGD(2, form=form), fraction_evaluate=1.0)
    grid = metered(3)
    arrays = model()
    for number in range(1, 8):
        if number == 4:
            grid.inner.wipe(grid.inner.node_id_of(0))
        new, _ = drive(strategy.round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
        arrays = arrays if new is None else new
        drive(strategy.evaluate_round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
    used = [report.used for report in strategy.reports.values()]
    # The server does not know that a node has lost its replica until the node says so.
    assert used.count(3) >= 6
    assert used[-2:] == [3, 3]


def test_a_frame_of_another_basis_is_refused_and_goes_back_into_the_memory() -> None:
    """A client that sends on the basis of the round before, under whatever name, is never summed."""
    kept: list[RecordDict] = []

    def cheat(msg: Message, context: Context) -> Message:
        number = int(msg.content.config_records.get("config", {}).get("server-round", 0))
        reply = honest(msg, context)
        if context.node_config["partition-id"] == 1 and has_frame(reply.content, VALUES):
            if number == 2:
                kept.append(reply.content)
            if number == 4:
                put_frame(reply.content, VALUES, take_frame(kept[0], VALUES))
        return reply

    honest = app()
    strategy = Watched(PowerSGD(2))
    grid = metered(3, client=cheat)
    strategy.start(grid, model(), num_rounds=5, timeout=9)
    (reason,) = strategy.reports[4].refused.values()
    assert "two bases do not add" in reason
    assert strategy.reports[4].used == 2
    # It is not acknowledged, and the client's own frame, which nobody has seen, goes back.
    assert strategy.reports[5].rolled_back == [grid.inner.node_id_of(1)]
    assert strategy.reports[5].used == 3


@pytest.mark.parametrize("form", FORMS)
def test_a_vanished_client_changes_nothing_of_its_state(form: str) -> None:
    """The handler fails at its end, on a training message or a query: state as before, to the last bit."""
    kind = "train" if form == "alternating" else "query"

    def fault(delivery: Delivery):
        return "raise" if (delivery.round, delivery.partition, delivery.message_type) == (3, 1, kind) else None

    strategy = SharedBasis(PowerSGD(2, form=form))
    grid = metered(3, fault=fault)
    node = grid.inner.node_id_of(1)
    result = fit(strategy, grid, model(), 2, timeout=9)

    def snapshot() -> dict[str, bytes]:
        state = grid.inner.context(node).state.array_records
        return {k: a.numpy().tobytes() for k, a in state["fedcomp.memory"].items()}

    before = snapshot()
    fit(strategy, grid, result.arrays, 3, start_round=3, timeout=9)
    if form == "alternating":
        assert snapshot() == before
    else:
        # The training message was answered, and acknowledged: its update waits. The query left no trace.
        after = snapshot()
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert "update" in changed
        assert "memory" not in changed
    assert len(strategy.reports[3].refused) == 1


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("error_state", ["discard", pytest.param("keep", marks=pytest.mark.long)])
def test_conservation_under_faults(form: str, error_state: str) -> None:
    """10 clients, 60 rounds, every kind of message lost, duplicated, late, crashed or damaged, nodes wiped: for every
    life of every node, updates made = delivered + owed, elementwise."""
    plan = RandomFaults(
        Key(11, "faults"), {"lost_reply": 0.1, "duplicate": 0.1, "late": 0.1, "raise": 0.1, "corrupt": 0.02}, pushes=1
    )
    grid = InProcessGrid(app(), 10, seed=5, fault=plan, error_state=error_state)
    strategy = Watched(PowerSGD(2, form=form))
    arrays = model()
    made: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    left: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(SIZE))
    nodes = list(grid.get_node_ids())
    partition = {n: int(grid.context(n).node_config["partition-id"]) for n in nodes}

    def settle(node: int) -> None:
        context = grid.context(node)
        if "toy.sum" in context.state:
            made[partition[node]] += context.state.array_records["toy.sum"]["sum"].numpy()
        left[partition[node]] += owed(strategy, context, node, LAYOUT)

    wipes = 0
    for round_ in range(1, 61):
        new, _ = drive(strategy.round(round_, arrays, ConfigRecord(), grid), grid, timeout=9)
        arrays = new if new is not None else arrays
        for node in nodes:
            if Key(13, "wipe", round_, partition[node]).uniform(1)[0] < 0.01:
                settle(node)
                grid.wipe(node)
                wipes += 1
    for node in nodes:
        settle(node)
    assert wipes >= 3
    reports = strategy.reports.values()
    assert sum(r.lost for r in reports) > 50
    assert sum(len(r.refused) for r in reports) > 40
    assert sum(len(r.rolled_back) for r in reports) > 30
    assert sum(r.compressed for r in reports) > 200
    for p in range(10):
        assert np.abs(strategy.delivered[p] + left[p] - made[p]).max() < 0.5
        assert np.abs(made[p]).max() > 1000


@pytest.mark.slow
def test_without_rolling_back_mass_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails for a client that forgets what was not acknowledged."""
    monkeypatch.setattr(PowerSGD, "rollback", lambda self, state, frame, layout: state)
    grid = InProcessGrid(app(), 3, seed=5, fault=RandomFaults(Key(11, "faults"), {"lost_reply": 0.3}))
    strategy = Watched(PowerSGD(2))
    fit(strategy, grid, model(), 20, timeout=9)
    missing = 0.0
    for node in grid.get_node_ids():
        context = grid.context(node)
        made = context.state.array_records["toy.sum"]["sum"].numpy()
        p = int(context.node_config["partition-id"])
        missing += float(np.abs(strategy.delivered[p] + owed(strategy, context, node, LAYOUT) - made).max())
    assert missing > 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("evaluated", [0.0, 1.0])
def test_the_aggregated_memory_is_corrected_by_the_mean_that_came_down(form: str, evaluated: float) -> None:
    """Σ a_i memory_i is conserved, and each client's is its own: p minus the mean, not its own product. Evaluations
    bring the step before the next training message does."""
    strategy = Watched(PowerSGD(2, form=form, memory="aggregated"), fraction_evaluate=evaluated)
    grid = metered(3)
    result = fit(strategy, grid, model(), 5, timeout=9)
    # One round more, at whose beginning the last correction is made.
    fit(strategy, grid, result.arrays, 6, start_round=6, timeout=9)
    for node in grid.get_node_ids():
        context = grid.inner.context(node)
        state = {k: v.numpy() for k, v in context.state.array_records["fedcomp.memory"].items()}
        made = context.state.array_records["toy.sum"]["sum"].numpy()
        p = int(context.node_config["partition-id"])
        frame = context.state["fedcomp.reply/" + NODE_RECORD][VALUES]
        own = strategy.codec.rollback(state, frame, LAYOUT)["memory"]
        # All it was given, less the means of the rounds before: the last one has not come down.
        weight = slice(0, 1200)
        means = sum(strategy.means[number] for number in range(1, 6))
        np.testing.assert_allclose(own[weight], (made - means)[weight], rtol=0, atol=0.5)
        assert np.abs(strategy.delivered[p][weight] - sum(strategy.means.values())[weight]).max() > 100


@pytest.mark.parametrize("form", FORMS)
def test_partial_participation_and_warm_up(form: str) -> None:
    strategy = Watched(PowerSGD(2, form=form), fraction_train=0.5, warmup_rounds=2, fraction_evaluate=1.0)
    result, _ = run(strategy, 6, rounds=8)
    assert [report.used for report in strategy.reports.values()] == [3] * 8
    assert strategy.reports[2].changed == 1200
    assert strategy.reports[2].payload_bytes > 4 * strategy.reports[3].payload_bytes
    assert all(not evaluation.refused for evaluation in strategy.evaluations.values())
    np.testing.assert_allclose(stack(result.arrays), sum(strategy.means.values()), rtol=1e-4, atol=0.1)


def test_dense_rounds_are_plain_fedavg() -> None:
    shared, _ = run(SharedBasis(warmup_rounds=9), 3, rounds=3)
    plain = fedavg(fraction_evaluate=0.0).start(metered(3), model(), num_rounds=3, timeout=9)
    np.testing.assert_allclose(stack(shared.arrays), stack(plain.arrays), rtol=1e-6, atol=1e-3)


def test_a_server_step_scales_what_comes_down() -> None:
    whole, _ = run(SharedBasis(PowerSGD(2)), 3, rounds=1)
    half, _ = run(SharedBasis(PowerSGD(2), server_lr=0.5), 3, rounds=1)
    np.testing.assert_allclose(stack(half.arrays), 0.5 * stack(whole.arrays), rtol=1e-6, atol=1e-4)
    with pytest.raises(ConfigError, match="aggregated"):
        SharedBasis(PowerSGD(memory="aggregated"), server_lr=0.5)


@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_goes_on_bit_for_bit(form: str, tmp_path: Path) -> None:
    """The last step and its basis are in the checkpoint: without them the basis would be drawn anew."""
    whole = SharedBasis(PowerSGD(2, form=form))
    result, _ = run(whole, 3, rounds=6)
    first, grid = SharedBasis(PowerSGD(2, form=form)), metered(3)
    half = fit(first, grid, model(), 3, timeout=9)
    path = tmp_path / "run.ckpt"
    checkpoint.save(path, server_round=3, arrays=half.arrays, strategy=first, grid=grid)
    held, second = checkpoint.load(path), SharedBasis(PowerSGD(2, form=form))
    held.apply(second, grid)
    again = fit(second, grid, held.arrays, 6, start_round=4, timeout=9)
    np.testing.assert_array_equal(stack(result.arrays), stack(again.arrays))


def test_a_model_that_was_changed_between_rounds_is_sent_whole_with_the_basis() -> None:
    strategy = Watched(PowerSGD(2))
    grid = Sent(metered(3))
    result = fit(strategy, grid, model(), 3, timeout=9)
    moved = ArrayRecord({name: Array(array.numpy() + 1) for name, array in result.arrays.items()})
    fit(strategy, grid, moved, 5, start_round=4, timeout=9)
    # The basis follows from a step that all have had.
    assert all(keys == {"arrays", "blob"} for number, _, _, keys in grid.messages if number == 4)
    assert strategy.again[4] == []
    assert strategy.bases[4].side == 1 - strategy.bases[3].side, "the basis is that of the last step"
    assert [report.used for report in strategy.reports.values()] == [3] * 5


def test_clients_of_other_systems_are_served_beside_it() -> None:
    """One app answers both kinds; a client without the half is named and left out."""
    both = client_app([programs()])
    result, _ = run(SharedBasis(PowerSGD(2)), 2, client=both)
    assert np.abs(stack(result.arrays)).max() > 0
    lacking = client_app()

    def client(msg: Message, context: Context) -> Message:
        return (lacking if context.node_config["partition-id"] == 0 else both)(msg, context)

    strategy = SharedBasis(PowerSGD(2))
    run(strategy, 3, client=client, rounds=2)
    (reason,) = strategy.reports[1].refused.values()
    assert "its app cannot take part in SharedBasis" in reason


def test_what_a_shared_basis_does_not_take() -> None:
    with pytest.raises(ConfigError, match="PowerSGD"):
        SharedBasis(ScaleCom())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 exchanges"):
        Compressed(fedavg(), PowerSGD())
    with pytest.raises(ConfigError):
        SharedBasis(TopK(0.1))  # type: ignore[arg-type]


def test_low_rank_serves_the_drop_in_pair_in_both_directions() -> None:
    """Nothing shared: an uplink in error feedback, and a downlink whose replicas are the server's reference."""
    strategy = Compressed(fedavg(), LowRank(3), downlink=LowRank(5))
    assert strategy.codec == ErrorFeedback(LowRank(3))
    result = strategy.start(metered(3), model(), num_rounds=5, timeout=9)
    assert [report.used for report in strategy.reports.values()] == [3] * 5
    assert all(not report.refused and not report.notes for report in strategy.evaluations.values())
    assert np.abs(stack(result.arrays)).max() > 100
