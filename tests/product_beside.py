"""A program on :class:`fedcomp.local.Local` beside the strategy that it stands for, bit for bit.

For as long as both exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any
from unittest import mock

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from toy import client_app, update

from fedcomp import versions
from fedcomp.clients.half import ClientHalf
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.payload import take_frame
from fedcomp.flower.rounds import drive
from fedcomp.flower.wrapper import GridWrapper
from fedcomp.layout import DensityPolicy, Layout, Vector
from fedcomp.local import Local
from fedcomp.program import System

Plan = Callable[[int, int, str], str]
"""``plan(number, node, kind)``: what goes wrong with a message, "train" or "query"; in the words of ``Local.fault``."""

_KINDS = {"": None, "silent": "offline", "lost": "lost_reply", "crash": "raise", "twice": "duplicate"}


class _Kept(GridWrapper):
    """Keeps the frames that arrive, by node and name."""

    def __init__(self, inner: InProcessGrid, keys: Mapping[str, str]) -> None:
        super().__init__(inner)
        self.keys, self.frames = keys, {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            if reply.has_error():
                continue
            node = int(self.inner.context(reply.metadata.src_node_id).node_config["partition-id"])
            for key, name in self.keys.items():
                if (frame := take_frame(reply.content, key)) is not None:
                    self.frames[node, name] = bytes(frame)
        return replies


class Toy:
    """The toy app's updates as the driver in memory wants them."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], policy: DensityPolicy | None = None) -> None:
        self.shapes = shapes
        self.start = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        self.layout = Layout.of(self.start, policy)

    def made(self, number: int, node: int) -> Vector:
        return self.layout.flatten({k: update(number, node, s, i) for i, (k, s) in enumerate(self.shapes.items())})

    def local(self, system: System, nodes: int = 4, **options: Any) -> Local:
        """Return the driver with the toy's updates and weights."""
        return Local(
            system,
            self.layout,
            self.layout.flatten(self.start),
            lambda number, node, start: start + self.made(number, node),
            lambda node: 10.0 * (node + 1),
            nodes,
            **options,
        )


def beside(
    toy: Toy,
    strategy: Any,
    half: ClientHalf,
    system: System,
    rounds: int,
    keys: Mapping[str, str],
    *,
    nodes: int = 4,
    plan: Plan = lambda number, node, kind: "",
) -> Local:
    """Run both and compare what the server got, what it sent down, the models and the memories, round by round.

    Parameters
    ----------
    keys : mapping of str to str
        Of the frames of replies in messages: what the program calls them.
    """

    number = 0

    def fault(delivery: Any) -> Any:
        # Of a query the grid does not know the round.
        return _KINDS[plan(number, delivery.partition, delivery.message_type.partition(".")[0])]

    grid = _Kept(InProcessGrid(client_app([half]), nodes, seed=4, fault=fault, error_state="discard"), keys)
    local = toy.local(system, nodes, fault=lambda n, p, e: plan(n, p, "train" if e == 1 else "query"))
    arrays = ArrayRecord({name: Array(array) for name, array in toy.start.items()})
    steps: list[bytes] = []
    push = versions.Broadcast.push

    def kept(self: Any, frame: bytes, *args: Any, **options: Any) -> int:
        steps.append(bytes(frame))
        return push(self, frame, *args, **options)

    with mock.patch.object(versions.Broadcast, "push", kept):
        for number in range(1, rounds + 1):
            grid.frames.clear()
            steps.clear()
            moved, metrics = drive(strategy.round(number, arrays, ConfigRecord(), grid), grid, timeout=9)
            arrays = arrays if moved is None else moved
            step = local.step(number)
            assert [s.frame for s in [step] if s is not None and s.frame is not None] == steps, number
            assert {(a.node, k): f for a in local.answers for k, f in a.frames.items()} == grid.frames, number
            theirs = toy.layout.flatten({name: array.numpy() for name, array in arrays.items()})
            assert np.array_equal(theirs.view(np.uint32), local.model.view(np.uint32)), number
            for name, value in step.metrics.items() if step is not None else ():
                assert metrics[name] == value, (number, name)
            _same_memories(grid, local, number)
    return local


def _same_memories(grid: _Kept, local: Local, number: int) -> None:
    for address in grid.get_node_ids():
        context = grid.inner.context(address)
        held = context.state.array_records.get("fedcomp.uplink.memory")
        client = local.clients.get(int(context.node_config["partition-id"]))
        theirs = {} if held is None else {k: a.numpy() for k, a in held.items()}
        ours = {} if client is None or held is None else client.memory
        assert theirs.keys() == ours.keys(), number
        for name, array in theirs.items():
            assert array.tobytes() == ours[name].tobytes(), (number, context.node_config["partition-id"], name)
