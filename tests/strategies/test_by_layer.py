"""Layer by layer: the same bits as one exchange, and what happens when a part is lost, damaged or another message's."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict
from test_shared_factors import KNOWN, app, codec, network, pair, record_of, run
from toy import client_app, fedavg, model, stack

from fedcomp import wire
from fedcomp.clients.parts import by_layer_mod
from fedcomp.codecs import Codec, Factors, TopK
from fedcomp.errors import ConfigError
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.parts import PartAnswer, PartRequest
from fedcomp.flower.payload import NODE_RECORD, put_frame, take_frame
from fedcomp.flower.protocol import UPDATE
from fedcomp.flower.rounds import fit
from fedcomp.layout import NONE_DENSE, Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.by_layer import LayerByLayer, Parts
from fedcomp.strategies.compressed import Compressed
from fedcomp.systems.factors import joined, layers, split
from fedcomp.timing.pipeline import layered

LAYERS = 3


def said(strategy: LayerByLayer, number: int) -> Parts:
    return strategy.reports[number].section(Parts)


@pytest.mark.parametrize("mode", ["dad", "edad", "rank"])
def test_what_comes_of_it_is_what_comes_of_one_exchange_bit_for_bit(mode: str) -> None:
    at_once = run(pair(mode=mode), rounds=4)
    strategy = LayerByLayer(pair(mode=mode))
    assert run(strategy, rounds=4).tobytes() == at_once.tobytes()  # type: ignore[arg-type]
    for number in range(1, 5):
        assert said(strategy, number) == Parts(number, exchanges=LAYERS, whole=0, incomplete=0)
        assert strategy.reports[number].used == 3


def test_memory_goes_on_as_with_one_exchange() -> None:
    def made() -> Compressed:
        return Compressed(fedavg(fraction_evaluate=0.0), Factors(rank=2), feedback=True)

    strategy = LayerByLayer(made())
    assert run(strategy, rounds=5).tobytes() == run(made(), rounds=5).tobytes()  # type: ignore[arg-type]
    assert all(not strategy.reports[r].rolled_back for r in range(1, 6))


def test_the_last_layer_comes_first_and_every_byte_is_counted() -> None:
    strategy = LayerByLayer(pair())
    seen: list[tuple[str, list[Any]]] = []

    class Watching(MeteredGrid):
        def send_and_receive(self, messages: Any, **options: Any) -> list[Message]:
            replies = super().send_and_receive(messages, **options)
            for reply in replies:
                frame = take_frame(reply.content, UPDATE)
                assert frame is not None
                seen.append((messages[0].metadata.message_type, [t.shape for t in wire.decode(frame).tensors]))
            return replies

    with InProcessGrid(app(), 3, seed=4) as inner:
        grid = Watching(inner)
        fit(strategy, grid, record_of(network()), 1)
        fetched = grid.ledger.total("messages", message_type="query", direction="up")
    assert [kind for kind, _ in seen] == ["train"] * 3 + ["query"] * 6
    # Clients have batches of 5, 12 and 9 rows; each layer's bias follows from its factors.
    assert [shapes for _, shapes in seen[::3]] == [[(5, 28), (0,)], [(5, 54), (0,)], [(5, 70), (0,)]]
    assert fetched == 6


def test_frames_without_a_tensor_for_each_come_whole_and_it_is_said() -> None:
    def made() -> Compressed:
        return Compressed(fedavg(fraction_evaluate=0.0), TopK(density=0.2))

    strategy = LayerByLayer(made())
    assert run(strategy, rounds=3).tobytes() == run(made(), rounds=3).tobytes()  # type: ignore[arg-type]
    assert said(strategy, 3) == Parts(3, exchanges=1, whole=3, incomplete=0)


def test_a_client_without_the_mods_is_used_as_ever() -> None:
    strategy = LayerByLayer(pair())
    with InProcessGrid(client_app([]), 2, seed=4) as inner:
        result = fit(strategy, MeteredGrid(inner), model(), 2)
    assert strategy.reports[2].used == 2
    assert np.abs(stack(result.arrays)).max() > 0


def test_a_lost_part_costs_that_clients_update_which_its_memory_puts_back() -> None:
    def fault(delivery: Delivery) -> str | None:
        lost = delivery.message_type == "query" and delivery.round == 2 and delivery.partition == 1
        return "lost_reply" if lost else None

    strategy = LayerByLayer(Compressed(fedavg(fraction_evaluate=0.0), Factors(rank=2), feedback=True))
    run(strategy, rounds=4, fault=fault)  # type: ignore[arg-type]
    assert said(strategy, 2).incomplete == 1
    assert strategy.reports[2].used == 2
    assert "part 2 of 3: no answer" in next(iter(strategy.reports[2].refused.values()))
    assert len(strategy.reports[3].rolled_back) == 1
    assert strategy.reports[3].used == 3


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda content: put_frame(content, UPDATE, b"no frame"), "WireError|frame|magic|shorter"),
        (lambda content: PartAnswer(0, 3, 1).put(content), "expected part 1 of 3"),
        (lambda content: PartAnswer(1, 3, 99).put(content), "of message 99"),
        (lambda content: PartAnswer(1, 7, 1).put(content), "of 7 of message"),
        (lambda content: content.pop(PartAnswer.KEY), "fedcomp.parts"),
        (lambda content: content[NODE_RECORD].pop(UPDATE), "expected part"),
    ],
)
def test_a_wrong_part_costs_its_sender_alone(change: Any, match: str) -> None:
    inner = app()

    def hostile(message: Message, context: Context) -> Message:
        reply = inner(message, context)
        if context.node_config["partition-id"] == 2 and message.metadata.message_type == "query":
            request = PartRequest.take(message.content)
            if request.part == 1:
                change(reply.content)
        return reply

    strategy = LayerByLayer(pair())
    run(strategy, rounds=1, client_app=hostile)  # type: ignore[arg-type]
    assert strategy.reports[1].used == 2
    (reason,) = strategy.reports[1].refused.values()
    assert re.search(match, reason), reason


def test_a_node_answers_no_question_about_another_message() -> None:
    with InProcessGrid(app(), 1, seed=4) as grid:
        node = next(iter(grid.get_node_ids()))
        content = RecordDict()
        PartRequest(1, 5).put(content)
        (reply,) = grid.send_and_receive([Message(content, node, "query")])
        assert "has no part 1 of message 5" in reply.error.reason
        damaged = RecordDict()
        PartRequest(1, 5).put(damaged)
        damaged[PartRequest.KEY]["part"] = -1  # type: ignore[index]
        (reply,) = grid.send_and_receive([Message(damaged, node, "query")])
        assert "damaged" in reply.error.reason


@pytest.mark.parametrize("made", [Factors(rank=3), codec("dad"), Factors(mode="dad", values="q8", **KNOWN)], ids=repr)
def test_split_and_joined_frames_are_the_same_bytes(made: Codec) -> None:
    layout = Layout.of({name: value.numpy() for name, value in network().state_dict().items()}, NONE_DENSE)
    vector = Key(3, "parts").generator().standard_normal(layout.size).astype(np.float32)
    frame, _ = made.encode(Update(vector, layout), made.init(layout), Key(3, "parts/encode"))
    parts = split(frame, layers(layout))
    assert layers(layout) == (2, 2, 2)
    assert len(parts) == LAYERS
    assert joined(parts, made.limits(layout)) == frame
    assert split(frame, (5,)) == split(frame, (2, 2)) == [frame]


def test_a_frame_with_more_than_tensors_is_not_divided() -> None:
    tensors = [wire.Tensor(wire.Raw(np.ones(3, np.float32)), (3,)) for _ in range(2)]
    frame = wire.encode(tensors, tlvs=[(3, b"more")])
    assert split(frame, (1, 1)) == [frame]


def test_the_mod_lets_other_messages_pass() -> None:
    content = RecordDict()

    def call_next(msg: Message, context: Context) -> Message:
        return msg

    with InProcessGrid(client_app([]), 1, seed=4):
        message = Message(content, 3, "train")
        assert by_layer_mod(message, None, call_next) is message  # type: ignore[arg-type]


def test_what_layers_cost_is_a_round_trip_each_and_what_they_may_hide_is_work() -> None:
    work, transfer = [3.0, 2.0, 1.0], [0.5, 1.0, 2.0]
    by_layer, at_once = layered(work, transfer, 0.25)
    assert at_once == 6.0 + 3.5 + 0.5
    assert by_layer == at_once + 2 * 2 * 0.25
    hidden, _ = layered(work, transfer, 0.25, during=True)
    # 3.25 the first answer leaves, at 4 it is there; the second, ready at 5.25, is there at 6.5; the third at 9.
    assert hidden == 9.0
    assert layered(work, transfer, 0.0, during=True)[0] < layered(work, transfer, 0.0)[0]


def test_it_stands_around_compression_only() -> None:
    with pytest.raises(ConfigError, match="whose frames are divided"):
        LayerByLayer(fedavg())  # type: ignore[arg-type]
