"""Packed models: the same training bit for bit in fewer bytes, all of them reported; plain ones to who cannot read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from toy import by_partition, in_bfloat16

import fedcomp as fc
from fedcomp import wire
from fedcomp.errors import FedcompError
from fedcomp.flower import asks
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import STYPE
from fedcomp.flower.records import packed, to_arrays, unpacked
from fedcomp.measuring import traced
from fedcomp.rng import Key

# Every test trains, or packs 20 tensors.
pytestmark = pytest.mark.slow

NODES = 4
EVERYBODY = {"min_train_nodes": 1, "min_available_nodes": NODES, "min_evaluate_nodes": 1}


def model(dtype: str = "float32") -> ArrayRecord:
    """Return weights as they are drawn, a layer of zeros, a counter and a tensor too small to pack."""
    rng = Key(8, "start").generator()
    arrays: dict[str, np.ndarray] = {
        "weight": rng.standard_normal((300, 120), np.float32) * np.float32(0.05),
        "zeros": np.zeros((300, 120), np.float32),
        "bias": rng.standard_normal(7, np.float32),
    }
    if dtype == "bfloat16":
        return ArrayRecord({name: in_bfloat16(value) for name, value in arrays.items()})
    arrays["num_batches_tracked"] = np.array(0, np.int64)
    return ArrayRecord({name: Array(value) for name, value in arrays.items()})


class App:
    """An app that moves each value a little, and keeps the bytes that it was given, by message type and node."""

    def __init__(self, mods: Any = None) -> None:
        self.seen: dict[tuple[str, int, int], bytes] = {}
        self.app = ClientApp(mods=[fc.compression()] if mods is None else mods)

        @self.app.train()
        def train(msg: Message, context: Context) -> Message:
            number, node = self._note(msg, context)
            out = {}
            for name, value in to_arrays(msg.content["arrays"]).items():
                step = Key(5, "step", number, node).generator().standard_normal(value.shape) * 0.01
                out[name] = Array(
                    np.asarray(value + step.astype(value.dtype) if value.dtype.kind == "f" else value + 1)
                )
            metrics = MetricRecord({"num-examples": 10})
            return Message(RecordDict({"arrays": ArrayRecord(out), "metrics": metrics}), reply_to=msg)

        @self.app.evaluate()
        def evaluate(msg: Message, context: Context) -> Message:
            self._note(msg, context)
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 10, "loss": 1.0})}), reply_to=msg)

    def _note(self, msg: Message, context: Context) -> tuple[int, int]:
        number, node = int(msg.content["config"]["server-round"]), int(context.node_config["partition-id"])
        # As an app without this project reads it.
        given = b"".join(array.numpy().tobytes() for array in msg.content["arrays"].values())
        self.seen[msg.metadata.message_type, number, node] = given
        return number, node


def pair(codec: Any = None, downlink: Any = None, *, inner: Any = None, packed: bool = True) -> fc.Compressed:
    inner = inner or FedAvg(fraction_evaluate=0.0, **EVERYBODY)
    return fc.Compressed(inner, codec or fc.EDEN(bits=1), downlink, packed=packed)


def run(strategy: Any, apps: Any = None, start: ArrayRecord | None = None, *, rounds: int = 3, **options: Any) -> Any:
    """Train; return the result, the ledger and the grid."""
    apps = App() if apps is None else apps
    each = apps if isinstance(apps, list) else [apps] * NODES
    grid = MeteredGrid(InProcessGrid(by_partition(lambda partition: each[partition].app), NODES, seed=3, **options))
    result = strategy.start(grid, model() if start is None else start, num_rounds=rounds, timeout=9)
    return result.arrays, grid.ledger, grid.inner


def by_node(messages: Any) -> list[Message]:
    """Return messages in the order of nodes: Flower draws in one that differs between runs."""
    return sorted(messages, key=lambda message: message.metadata.dst_node_id)


class Taking(FedAvg):
    """FedAvg that trains two nodes, others in each round, and evaluates on all."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        messages = by_node(super().configure_train(server_round, arrays, config, grid))
        return [message for i, message in enumerate(messages) if (i + server_round) % NODES < 2]


def saved(strategy: Any) -> int:
    reports = [*strategy.reports.values(), *strategy.evaluations.values()]
    return sum(int(report.figures().get("packed.saved", 0)) for report in reports)


def down(ledger: TrafficLedger, **which: Any) -> int:
    return int(ledger.total("payload", direction="down", **which))


@pytest.mark.parametrize(
    "downlink", [None, fc.Identity(), fc.EDEN(bits=1, scale="least"), fc.TopK(density=0.02)], ids=repr
)
def test_the_training_is_the_same_and_each_byte_saved_is_reported(downlink: Any) -> None:
    """With clients that are only evaluated in some rounds, so that whole models go out for evaluation, too."""
    found = []
    for option in (False, True):
        app = App()
        strategy = pair(None, downlink, inner=Taking(**EVERYBODY), packed=option)
        arrays, ledger, _ = run(strategy, app, rounds=4)
        found.append((strategy, {name: array.data for name, array in arrays.items()}, app.seen, ledger))
    (plain, arrays, seen, without), (strategy, others, same, ledger) = found
    assert arrays == others
    assert seen == same
    assert len(seen) > 3 * NODES
    assert saved(plain) == 0
    assert saved(strategy) == down(without) - down(ledger) > 0
    assert ledger.total("payload", direction="up") == without.total("payload", direction="up")
    # Of the first models the zeros travel for nothing, and the weights 1.2 times shorter.
    first = down(ledger, round=1, message_type="train"), down(without, round=1, message_type="train")
    assert 0.41 * first[1] < first[0] < 0.43 * first[1]


@pytest.mark.parametrize("downlink", [fc.EDEN(1, scale="least"), None], ids=repr)
def test_evaluation_counts_apart_from_training(downlink: Any) -> None:
    found = []
    for option in (False, True):
        strategy = pair(None, downlink, inner=Taking(**EVERYBODY), packed=option)
        found.append(run(strategy, rounds=1)[1])
    for kind, reports in (("train", strategy.reports), ("evaluate", strategy.evaluations)):
        # Who trained needs a step, and the two others the whole model.
        fewer = down(found[0], message_type=kind) - down(found[1], message_type=kind)
        assert reports[1].figures()["packed.saved"] == fewer > 10_000


def test_a_client_without_the_mod_is_named_once_and_takes_part_from_then_on() -> None:
    apps = [App(), App(), App(mods=[]), App()]
    strategy = pair()
    _, _, grid = run(strategy, apps)
    (node,) = [n for n in grid.get_node_ids() if int(grid.context(n).node_config["partition-id"]) == 2]
    refused = [report.refused for report in strategy.reports.values()]
    assert [list(each) for each in refused] == [[node], [], []]
    assert "cannot read packed models" in refused[0][node]
    assert [report.used for report in strategy.reports.values()] == [3, 4, 4]
    assert [report.without_mod for report in strategy.reports.values()] == [[], [node], [node]]
    assert [peer.plain for peer in strategy.roster.peers.values()].count(True) == 1
    # Kept with the state: it must not be refused once more after a restart of the server.
    again = pair()
    again.load_state_dict(strategy.state_dict())
    assert again.roster.peer(node).plain


def test_an_error_of_the_engine_or_of_a_known_client_changes_nothing() -> None:
    def away(delivery: Any) -> str | None:
        return "offline" if delivery.partition == 1 and delivery.round == 1 else None

    def failing(msg: Message, context: Context, call_next: Any) -> Message:
        if int(msg.content["config"]["server-round"]) == 2:
            raise RuntimeError("a fault of the app")
        return call_next(msg, context)

    apps = [App(), App(), App(mods=[fc.compression(), failing]), App()]
    strategy = pair()
    run(strategy, apps, fault=away)
    assert [len(report.refused) for report in strategy.reports.values()] == [1, 1, 0]
    assert not any(peer.plain for peer in strategy.roster.peers.values())
    assert not any("packed" in reason for report in strategy.reports.values() for reason in report.refused.values())


@pytest.mark.parametrize("downlink", [None, fc.TopK(density=0.02)], ids=repr)
def test_a_model_damaged_on_its_way_is_refused_and_sent_again(downlink: Any) -> None:
    def damage(msg: Message, context: Context, call_next: Any) -> Message:
        if msg.metadata.message_type == "train" and int(msg.content["config"]["server-round"]) == 1:
            array = msg.content["arrays"]["weight"]
            assert array.stype == STYPE
            data = bytearray(array.data)
            data[len(data) // 2] ^= 4
            msg.content["arrays"]["weight"] = Array(array.dtype, array.shape, array.stype, bytes(data))
        return call_next(msg, context)

    apps = [App(), App(), App(mods=[damage, fc.compression()]), App()]
    strategy = pair(None, downlink)
    run(strategy, apps)
    (reason,) = strategy.reports[1].refused.values()
    assert "fedcomp.resync: CRC-32" in reason
    assert [report.used for report in strategy.reports.values()] == [3, 4, 4]
    assert not any(peer.plain for peer in strategy.roster.peers.values())


def test_models_of_sixteen_bits_arrive_as_they_are() -> None:
    seen, sizes = [], []
    for option in (False, True):
        app = App()
        strategy = pair(packed=option)
        _, ledger, _ = run(strategy, app, model("bfloat16"), rounds=1)
        seen.append(app.seen)
        sizes.append(down(ledger))
    assert seen[0] == seen[1]
    assert sizes[1] < 0.5 * sizes[0]


@pytest.mark.parametrize(
    "overlapping", [lambda pair: fc.PipelinedStrategy(pair, width=2), lambda pair: fc.Buffered(pair, NODES, buffer=2)]
)
def test_rounds_that_overlap_are_packed_too(overlapping: Any) -> None:
    found = []
    for option in (False, True):
        app = App()
        few = FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1)
        arrays, ledger, _ = run(overlapping(pair(inner=few, packed=option)), app, rounds=4)
        found.append(({name: array.data for name, array in arrays.items()}, app.seen, down(ledger)))
    assert found[0][:2] == found[1][:2]
    assert found[1][2] < 0.9 * found[0][2]


def test_adapters_are_packed_and_others_are_not_unless_asked() -> None:
    assert fc.Adapters(FedAvg()).packed
    assert not fc.Compressed(FedAvg()).packed
    assert not fc.Adapters(FedAvg(), packed=False).packed
    with pytest.raises(fc.ConfigError, match="packed"):
        fc.Compressed(FedAvg(), packed="yes")


def test_nothing_is_packed_for_a_strategy_s_several_models_but_their_own_bytes() -> None:
    """Each node's own model is packed by itself: what one is sent is never what was packed for another."""

    class Own(FedAvg):
        def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
            for i, message in enumerate(by_node(super().configure_train(server_round, arrays, config, grid))):
                given = {k: Array(np.asarray(a.numpy() + a.numpy().dtype.type(i))) for k, a in arrays.items()}
                # Flower puts one content into all messages.
                message.content = RecordDict({**message.content, "arrays": ArrayRecord(given)})
                yield message

    seen = []
    for option in (False, True):
        app = App()
        strategy = pair(fc.EDEN(bits=4), inner=Own(fraction_evaluate=0.0, **EVERYBODY), packed=option)
        run(strategy, app, rounds=2)
        seen.append(app.seen)
    assert seen[0] == seen[1]
    assert len(set(seen[0].values())) == 2 * NODES
    assert saved(strategy) > 0


# The form by itself.


def hard() -> dict[str, np.ndarray]:
    """Return tensors that a form may get wrong."""
    rng = np.random.default_rng(2)
    normal = rng.standard_normal((180, 100)).astype(np.float32)
    return {
        "normal": normal,
        "by columns": np.asfortranarray(normal),
        "every other": normal[:, ::2],
        "constant": np.full((150, 120), 0.1, np.float32),
        "one-hot": np.eye(140, dtype=np.float32),
        "ties": np.sign(normal),
        "huge": normal * np.float32(1e37),
        "not finite": np.resize(np.array([0x7FC00001, 0xFF800001, 0x80000000, 1], np.uint32), 18_000).view(np.float32),
        "float64": normal.astype(np.float64) / 3,
        "float16": normal.astype(np.float16).repeat(3),
        "counters": np.arange(9000).reshape(9, 10, 100),
        "bytes": rng.integers(0, 256, 80_000, np.uint8),
        "flags": rng.random(80_000) < 0.5,
        "complex": normal.astype(np.complex64),
        "big-endian": normal.astype(">f4"),
        "nine dimensions": np.tile(normal[:, :64], (2, 1)).reshape(360, 2, 2, 2, 2, 2, 2, 1, 1),
        "empty": np.zeros((0, 5), np.float32),
        "0-d": np.array(3.5),
        "small": normal[0],
    }


def _words(array: Array) -> bytes:
    """Return the words of an array of bfloat16 behind its header, which two writers spell in two ways."""
    return array.data[-2 * math.prod(array.shape) :]


def test_every_tensor_comes_back_bit_for_bit_and_none_is_longer() -> None:
    arrays = {name: Array(value) for name, value in hard().items()}
    words = np.concatenate([np.arange(1 << 16), np.full(9000, 0x3F80)]).astype(np.uint16)
    arrays["every bfloat16"] = in_bfloat16((words.astype(np.uint32) << 16).view(np.float32))
    arrays["somebody's own"] = Array("float32", (20_000,), "other.format", bytes(80_000))
    record = ArrayRecord(arrays)
    short = packed(record)
    back = unpacked(short)
    assert list(back) == list(short) == list(record)
    for name, array in record.items():
        assert len(short[name].data) <= len(array.data), name
        assert (short[name].dtype, short[name].shape) == (array.dtype, array.shape), name
        assert (back[name].dtype, tuple(back[name].shape), back[name].stype) == (
            array.dtype,
            tuple(array.shape),
            array.stype,
        ), name
        if array.stype == "other.format":
            assert back[name] is short[name] is array
        elif array.dtype == "bfloat16":
            assert _words(back[name]) == _words(array)
        else:
            found, value = back[name].numpy(), array.numpy()
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert found.tobytes() == value.tobytes(), name
    gained = {name for name in record if len(short[name].data) < len(record[name].data)}
    assert {"normal", "by columns", "constant", "one-hot", "ties", "not finite", "float64", "float16"} <= gained
    assert {"counters", "nine dimensions", "every bfloat16"} <= gained
    assert unpacked(record) is record


def test_what_a_forged_tensor_claims_is_refused_before_memory_is_taken_for_it() -> None:
    honest = packed(model())["weight"]
    assert honest.stype == STYPE

    def forged(**other: Any) -> ArrayRecord:
        own = {"dtype": honest.dtype, "shape": honest.shape, "stype": STYPE, "data": honest.data, **other}
        return ArrayRecord({"weight": Array(**own)})

    size = math.prod(honest.shape)
    cases = [
        {"shape": (10**6, 10**6)},
        {"shape": (size + 1,)},
        {"shape": (-size,)},
        {"shape": (-300, -120)},
        {"shape": (2**62, 4)},
        {"dtype": "float64"},
        {"dtype": "bool"},
        {"dtype": "object"},
        {"dtype": "bfloat16"},
        {"dtype": "no dtype"},
        {"data": b""},
        {"data": honest.data[:-1]},
        {"data": honest.data + b"\0"},
        {"data": bytes(len(honest.data))},
    ]

    def refuse() -> None:
        for other in cases:
            with pytest.raises(FedcompError):
                unpacked(forged(**other))

    assert traced(refuse).peak < 20 * size


def test_a_packed_tensor_is_a_frame_of_planes_under_its_own_name() -> None:
    """The frame's own bytes are kept in tests/wire/golden.json."""
    short = packed(ArrayRecord({"w": Array(np.zeros((200, 100), np.float32))}))["w"]
    assert (short.dtype, tuple(short.shape), short.stype) == ("float32", (200, 100), STYPE)
    (tensor,) = wire.decode(short.data).tensors
    assert (tensor.name, tensor.shape, tensor.dtype, tensor.values.name) == ("", (20_000,), "float32", "planes")
    assert len(short.data) < 300


def test_a_packed_model_is_asked_for_like_a_plain_one() -> None:
    """Heads are what they were: who reads packed models needs no word of it."""
    heads = []
    for option in (False, True):
        found: list[asks.AskHead] = []

        def note(msg: Message, context: Context, call_next: Any, found: Any = found) -> Message:
            found.append(asks.find_ask(msg.content))
            return call_next(msg, context)

        strategy = pair(fc.TopK(0.1), packed=option)
        strategy._session = bytes(8)
        run(strategy, App(mods=[note, fc.compression()]), rounds=1)
        heads.append(found)
    assert heads[0] == heads[1]
