"""Apps whose tensors stay on a device: the server gets the same bytes, memories stay there, and apps are not surprised.

torch's own CPU device stands for a GPU: the code is the same.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from toy import fedavg, update

import fedcomp as fc
from fedcomp import device
from fedcomp.flower import _private, nodes
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.records import TensorArray, size_of, to_arrays
from fedcomp.layout import Layout

torch = pytest.importorskip("torch")

NODES = 3
SHAPES = {"weight": (60, 50), "half": (40, 30), "wide": (30, 20), "mean": (7,), "scalar": ()}


def start() -> ArrayRecord:
    """Return a model of several dtypes, with an integer that travels exactly."""
    arrays = {name: update(0, 9, shape, layer) / 64 for layer, (name, shape) in enumerate(SHAPES.items())}
    arrays["wide"] = arrays["wide"].astype(np.float64)
    return ArrayRecord({**{k: Array(np.asarray(v)) for k, v in arrays.items()}, "steps": Array(np.asarray(3))})


class App:
    """An app that trains with torch: ``stay`` says what it tells :func:`fc.record`."""

    def __init__(self, *, stay: bool | None, load: bool = False, half: str = "") -> None:
        self.app = ClientApp(mods=[fc.compression()])
        self.stay, self.load, self.half = stay, load, half
        self.frames: dict[tuple[int, int], bytes] = {}
        self.app.train()(self.train)

    def train(self, msg: Message, context: Context) -> Message:
        (name, record), config = next(iter(msg.content.array_records.items())), msg.content.config_records
        number = int(next(iter(config.values()))["server-round"])
        node = int(context.node_config["partition-id"])
        arrays = to_arrays(record)
        given = fc.tensors(record, "cpu") if self.load else {k: torch.tensor(v) for k, v in arrays.items()}
        for layer, (key, tensor) in enumerate(given.items()):
            if key == "steps":
                tensor += number
                continue
            # In place, as a model trains that was loaded with assign=True.
            tensor += torch.tensor(update(number, node, tuple(tensor.shape), layer) / 128).to(tensor.dtype)
        if self.half:
            given["half"] = given["half"].to(getattr(torch, self.half))
        content = RecordDict({name: fc.record(given, stay=self.stay)})
        content["metrics"] = MetricRecord({"num-examples": node + 1})
        return Message(content, reply_to=msg)

    def run(
        self, codec: fc.Codec, *, rounds: int = 4, fault: Any = None, downlink: Any = None, read: bool = True
    ) -> list[Any]:
        """Return the mean of each round, the last model and the clients' memories, as bytes; memories as they are
        unless they are ``read``."""
        seen: list[Any] = []

        class Watching(FedAvg):
            def aggregate_train(self, server_round: int, replies: Any) -> Any:
                arrays, metrics = super().aggregate_train(server_round, replies)
                seen.append({k: v.data for k, v in arrays.items()})
                return arrays, metrics

        inner = Watching(fraction_evaluate=0.0, min_train_nodes=1, min_evaluate_nodes=1, min_available_nodes=NODES)
        strategy = fc.Compressed(inner, codec, downlink)
        with InProcessGrid(self.app, NODES, fault=fault) as grid:
            result = strategy.start(grid, start(), num_rounds=rounds)
            owed = [grid.context(node).state for node in grid.get_node_ids()]
        seen.append({k: v.data for k, v in result.arrays.items()})
        names = ("memory", "momentum")
        records = [state.get("fedcomp.memory", ArrayRecord()) for state in owed]
        arrays = [[array for name, array in record.items() if name in names] for record in records]
        seen.append([[array.data for array in record] for record in arrays] if read else arrays)
        return seen


def unlucky(delivery: Any) -> str | None:
    """Lose, repeat and break some answers of the first rounds."""
    return {(1, 0): "lost_reply", (2, 1): "duplicate", (2, 2): "raise", (3, 0): "offline", (3, 1): "lost_reply"}.get(
        (delivery.round, delivery.partition)
    )


FEEDBACK = fc.ErrorFeedback(fc.TopK(0.02))
CODECS = (
    FEEDBACK,
    fc.ErrorFeedback(fc.TopK(0.02, values="q2"), momentum=0.5),
    fc.TopK(0.05),
    # These work on the host.
    fc.ErrorFeedback(fc.TopK(0.02), memory="float16"),
    fc.EDEN(1),
    fc.Identity(),
)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("half", ["", "bfloat16", "float16"])
def test_server_and_memories_have_the_same_bytes(codec: fc.Codec, half: str) -> None:
    wanted = App(stay=False, half=half).run(codec, fault=unlucky)
    assert App(stay=True, half=half).run(codec, fault=unlucky) == wanted
    assert App(stay=True, half=half, load=True).run(codec, fault=unlucky) == wanted
    assert len(wanted) == 6


def test_with_a_compressed_downlink() -> None:
    options = {"downlink": fc.TopK(0.1), "fault": unlucky}
    wanted = App(stay=False).run(FEEDBACK, **options)
    assert App(stay=True, load=True).run(FEEDBACK, **options) == wanted


@pytest.fixture
def living(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let contexts live on as objects between messages, as in a process that keeps them."""
    monkeypatch.setattr(nodes, "context_to_bytes", lambda context: context)

    def again(context: Any) -> Context:
        if isinstance(context, bytes):
            return _private.context_from_bytes(context)
        fresh: Context = copy.copy(context)
        fresh.state = RecordDict(dict(context.state.items()))
        return fresh

    monkeypatch.setattr(nodes, "context_from_bytes", again)


@pytest.mark.usefixtures("living")
def test_where_contexts_live_on_memories_never_come_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost, doubled and broken answers included: rolled back and repeated there, by the same code."""
    wanted = App(stay=False).run(FEEDBACK, fault=unlucky)
    asked: list[str] = []
    own = TensorArray.__dict__["data"].func

    def data(array: TensorArray) -> bytes:
        asked.append(array.dtype)
        return own(array)

    monkeypatch.setattr(TensorArray, "data", property(data))
    sizes: list[int] = []
    whole = device.DeviceArray.__array__
    monkeypatch.setattr(
        device.DeviceArray,
        "__array__",
        lambda self, *args, **kwargs: sizes.append(self.size) or whole(self, *args, **kwargs),
    )
    found = App(stay=True).run(FEEDBACK, fault=unlucky, read=False)
    assert not asked
    memories = [array for record in found[-1] for array in record]
    assert [type(memory) for memory in memories] == [TensorArray] * NODES
    size = memories[0].shape[0]
    # Kept values, samples of 256 values a tensor, and the integer: never a whole update, never a large tensor.
    assert max(sizes) <= 256 < size // 8
    assert found[:-1] == wanted[:-1]
    assert [[memory.data] for memory in memories] == [[record[0]] for record in wanted[-1]]


@pytest.mark.usefixtures("living")
def test_what_is_uploaded_is_the_update_alone_once_the_model_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    own = device.uploaded
    monkeypatch.setattr(device, "uploaded", lambda values, where: sizes.append(values.size) or own(values, where))
    App(stay=True, load=True).run(FEEDBACK, rounds=1)
    # The memory of the first round begins on the host.
    layout = Layout.of(to_arrays(start()))
    assert [size for size in sizes if size > 500] == [layout.size] * NODES
    sizes.clear()
    App(stay=True).run(FEEDBACK, rounds=1)
    assert sum(size for size in sizes if size > 500) > 1.9 * NODES * layout.size


# Records.


def test_a_record_that_stays_holds_what_the_tensors_were() -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    state = {
        "own": weights,
        "turned": weights.T,
        "half": weights.to(torch.bfloat16),
        "steps": torch.tensor(3),
        "plain": np.ones(2),
    }
    stays, plain = fc.record(state, stay=True), fc.record(state)
    weights += 1
    assert [type(array) is TensorArray for array in stays.values()] == [True, True, True, True, False]
    assert [type(array) is TensorArray for array in plain.values()] == [False] * 5
    for name, array in plain.items():
        found = stays[name]
        assert (found.dtype, tuple(found.shape), found.stype) == (array.dtype, tuple(array.shape), array.stype)
        assert abs(size_of(found) - size_of(array)) <= 128
        assert isinstance(found, Array)
    assert "data" not in vars(stays["turned"])
    np.testing.assert_array_equal(stays["turned"].numpy(), plain["turned"].numpy())
    for name in ("own", "half", "steps", "plain"):
        assert stays[name].data == plain[name].data
        # As Flower itself sends it: a receiver knows no other class.
        assert stays[name].deflate() == plain[name].deflate()
        copied = copy.deepcopy(fc.record(state, stay=True)[name])
        assert type(copied) is Array


def test_a_plain_server_gets_what_a_plain_app_sends() -> None:
    """Without the other half on the server nothing is compressed, and Flower serialises the record."""

    def end(stay: bool) -> dict[str, bytes]:
        # One node: Flower samples nodes in an order of its own, and adds in it.
        with InProcessGrid(App(stay=stay).app, 1) as grid:
            result = fedavg(fraction_evaluate=0.0).start(grid, start(), num_rounds=2)
        return {k: v.data for k, v in result.arrays.items()}

    assert end(True) == end(False)


def test_tensors_of_a_record_are_the_apps_own() -> None:
    record = ArrayRecord({**start(), **fc.record({"b": torch.ones(3, dtype=torch.bfloat16)})})
    before = {name: array.data for name, array in record.items()}
    given = fc.tensors(record, "cpu")
    assert {name: str(tensor.dtype) for name, tensor in given.items()} == {
        **dict.fromkeys(("weight", "half", "mean", "scalar"), "torch.float32"),
        "wide": "torch.float64",
        "steps": "torch.int64",
        "b": "torch.bfloat16",
    }
    for tensor in given.values():
        tensor += 1
    assert {name: array.data for name, array in record.items()} == before
    for name, array in to_arrays(record, stay=True).items():
        assert isinstance(array, device.DeviceArray)
        np.testing.assert_array_equal(np.asarray(array), to_arrays(record)[name])


def test_it_is_logged_where_a_codec_works_on_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedcomp"):
        App(stay=True).run(fc.EDEN(1), rounds=1)
    assert sum("the trained model was copied to the host" in line for line in caplog.messages) == NODES
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="fedcomp"):
        App(stay=True).run(FEEDBACK, rounds=1)
        App(stay=False).run(fc.EDEN(1), rounds=1)
    assert not any("copied to the host" in line for line in caplog.messages)
