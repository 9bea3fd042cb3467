"""A frame is parsed once and added at once; where a reply of the round is refused, the sum is made again without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord
from toy import client_app, fedavg, model

from fedcomp import wire
from fedcomp.clients.compressed import compression
from fedcomp.codecs import EDEN, QSGD, Codec, Identity, NaturalCompression, ScaledSign, SignSGD, TopK, base
from fedcomp.errors import NonFiniteUpdate
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import put_frame
from fedcomp.flower.protocol import UPDATE
from fedcomp.flower.rounds import fit
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.hooked import Hooked
from fedcomp.strategies.sinks import MeanRule

NODES, ROUNDS, BAD = 5, 3, 2
Spoil = Callable[[Message], None]


def garbage(reply: Message) -> None:
    put_frame(reply.content, UPDATE, b"FCW1" * 10)


def unweighable(reply: Message) -> None:
    reply.content["metrics"]["num-examples"] = -1


def other_form(reply: Message) -> None:
    reply.content["metrics"] = MetricRecord({"num-examples": 2, "of its own": 1.0})


def absurd(reply: Message) -> None:
    """Multiply what the client trained to; called inside of the mod that encodes it."""
    arrays = reply.content.array_records["arrays"]
    for name, array in arrays.items():
        array.data = type(array)(array.numpy() * np.float32(1e12)).data
        arrays[name] = array


def app(spoil: Spoil | None, inside: bool = False) -> Any:
    def spoiled(msg: Message, context: Context, call_next: Any) -> Message:
        reply = call_next(msg, context)
        bad = msg.metadata.message_type == "train" and msg.content["config"]["server-round"] == BAD
        if spoil is not None and bad and context.node_config["partition-id"] == 1:
            spoil(reply)
        return reply

    return client_app([compression(), spoiled] if inside else [spoiled, compression()])


def trained(codec: Codec, client: Any, guard: Norms | None = None) -> tuple[list[bytes], list[int]]:
    """Return the bytes of the final model, and how many replies each round has used."""
    strategy = Hooked(fedavg(), codec, guard=guard)
    with InProcessGrid(client, NODES, seed=4) as grid:
        arrays = fit(strategy, grid, model(), ROUNDS, timeout=9).arrays
    return [a.numpy().tobytes() for a in arrays.values()], [strategy.reports[r].used for r in range(1, ROUNDS + 1)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the frames that were parsed."""
    lengths: list[int] = []
    honest = base.decode

    def decode(frame: Any, *args: Any, **options: Any) -> Any:
        lengths.append(len(frame))
        return honest(frame, *args, **options)

    monkeypatch.setattr(base, "decode", decode)
    return lengths


@pytest.mark.parametrize("codec", [Identity(), QSGD(7), TopK(0.5), EDEN(2), SignSGD(0.01)], ids=repr)
def test_every_frame_is_parsed_once(codec: Codec, parsed: list[int]) -> None:
    """Also where what was parsed of a round would take more memory than a model."""
    _, used = trained(codec, app(None))
    assert used == [NODES] * ROUNDS
    assert len(parsed) == NODES * ROUNDS


@pytest.mark.parametrize(
    ("codec", "values"),
    [(QSGD(7), wire.QsgdLevels), (NaturalCompression(), wire.Natural), (ScaledSign(), wire.SignScale)],
    ids=["qsgd", "natural", "sign"],
)
def test_values_are_decoded_once_for_the_reported_norm_and_the_sum(
    codec: Codec, values: type[wire.Values], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.flat(1000)
    vector = np.linspace(-1, 1, 1000, dtype=np.float32)
    frame, _ = codec.encode(Update(vector, layout), {}, Key(3))
    honest, made = values.decode, []

    def decode(self: Any) -> Any:
        made.append(self)
        return honest(self)

    monkeypatch.setattr(values, "decode", decode)
    bundle = codec.open(frame, layout)
    held = bundle.held_bytes()
    norm = codec.norm(bundle, layout)
    assert bundle.held_bytes() == held + 4 * 1000
    total = Update(np.zeros(1000, np.float32), layout)
    codec.gather(bundle, 0.5, total)
    assert len(made) == 1
    assert norm == pytest.approx(float(np.linalg.norm(2 * total.vector)), rel=1e-6)
    # What was kept is given away: memory of one reply at a time, whatever their number.
    assert bundle.held_bytes() == held
    codec.norm(bundle, layout)
    bundle.forget()
    assert bundle.held_bytes() == held
    again = Update(np.zeros(1000, np.float32), layout)
    codec.gather(bundle, 0.5, again)
    assert again.vector.tobytes() == total.vector.tobytes()


@pytest.mark.parametrize("codec", [Identity(), QSGD(7), TopK(0.5)], ids=repr)
@pytest.mark.parametrize(
    ("spoil", "inside", "guard"),
    [
        (garbage, False, None),
        (unweighable, False, None),
        (other_form, False, None),
        (absurd, True, Norms(times_median=10)),
    ],
    ids=["garbage", "unweighable", "other form", "outlier"],
)
def test_a_refused_reply_leaves_no_trace_in_the_sum(
    spoil: Spoil, inside: bool, guard: Norms | None, codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what is learnt when all replies are read before the first is added."""
    client = app(spoil, inside)
    found, used = trained(codec, client, guard)
    # A client's memory brings what was absurd once more.
    assert used[:BAD] == [NODES, NODES - 1]
    monkeypatch.setattr(MeanRule, "ahead", lambda *_: None)
    assert trained(codec, client, guard) == (found, used)
    # The spoiled round is another one without its culprit.
    assert trained(codec, app(None), guard)[0] != found


def test_a_frame_that_cannot_be_added_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec may find out only when it adds; what was added before it is then added again."""
    honest, bad, seen, failed = QSGD.gather, 7, [], []

    def gather(self: QSGD, frame: Any, factor: float, into: Any) -> None:
        update = self.decode(frame, into.layout).tobytes()
        if update not in seen:
            seen.append(update)
        if seen.index(update) == bad:
            failed.append(update)
            raise NonFiniteUpdate("it cannot be added")
        honest(self, frame, factor, into)

    monkeypatch.setattr(QSGD, "gather", gather)
    codec = QSGD(7)
    found, used = trained(codec, app(None))
    assert used == [NODES, NODES - 1, NODES]
    # When it was read, and when the sum was made again.
    assert len(failed) == 2
    seen.clear()
    monkeypatch.setattr(MeanRule, "ahead", lambda *_: None)
    assert trained(codec, app(None)) == (found, used)
