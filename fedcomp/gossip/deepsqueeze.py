"""DeepSqueeze: compressed models with error compensation, and no state at the receiver.

After Tang et al., "DeepSqueeze: Decentralization Meets Error-Compensated Compression", 2019, arXiv:1907.07346 (code of
the comparison in PowerGossip's repository was read):

    x_i <- x_i - lr * v_i
    q_i  = C(x_i + e_i);   e_i <- x_i + e_i - q_i      sent
    x_i <- x_i + gamma * sum_j W[i, j] (q_j - q_i)

The model itself is compressed, not its difference to something both ends know: q does not settle, ``gamma`` must be
small, and nodes stop at a distance from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from fedcomp.gossip.base import GossipMessage, Gradient, Multicast, Outbox, Real, State, View, real
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.packet import MessageFlag, pack, unpack
from fedcomp.gossip.steps import (
    BEGUN,
    AnyCompressor,
    Compressing,
    begun,
    descent,
    finite,
    incoming,
    settled,
    velocity,
)
from fedcomp.layout import Layout
from fedcomp.rng import Key
from fedcomp.rules import AboveZero, BelowOne, NotNegative


@dataclass(frozen=True, repr=False, eq=False)
class DeepSqueeze(Compressing):
    """Error-compensated compression of models on undirected graphs, fixed or time-varying.

    Parameters
    ----------
    lr, momentum : float
        Of the local step, heavy ball.
    gamma : float
        Consensus step size in (0, 1]; 0.05 for top-k of 2 %, 0.01 for signs.
    compressor : mapping or Compressor

    Notes
    -----
    State: ``"x"``; ``"v"`` with momentum; ``"error"``, what was not sent yet; ``"split"``.

    Examples
    --------
    >>> algorithm = DeepSqueeze(lr=0.05, gamma=0.05, compressor={"id": "topk", "density": 0.1})
    >>> algorithm.time_varying, algorithm.directed
    (True, False)
    """

    name: ClassVar[str] = "deepsqueeze"
    time_varying: ClassVar[bool] = True

    lr: NotNegative = 0.1
    momentum: BelowOne = 0.0
    gamma: AboveZero = 0.05
    compressor: AnyCompressor = field(default_factory=lambda: {"id": "topk", "density": 0.02})

    def init(self, model: Real, layout: Layout, *, common: Real | None = None) -> State:
        """Return the state of a node with no error to compensate; there are no estimates that would need ``common``."""
        x = real(model)
        split = np.array(layout.compressed_size, np.int64)
        return {"x": x, "error": np.zeros_like(x), "split": split, **velocity(x, self.momentum)}

    def model(self, state: State) -> Real:
        """Return x."""
        return state["x"]

    def reset(self, state: State, layout: Layout) -> State:
        """Return the state without what was begun; the error is the node's own and stays."""
        return settled(state)

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Begin an iteration: the local step, and the compressed model to all neighbours."""
        state = settled(state)
        step, moved = descent(state, gradient, state["x"], self.lr, self.momentum)
        x = finite(state["x"] if step is None else state["x"] - step, "the model after the local step")
        state = {**state, **moved, "x": x}
        # The sum may overflow although both are finite.
        wanted = finite(x + state["error"], "the model with what was not sent of it")
        key = _key(view.seed, view.iteration, view.node)
        data, change = self._compressor.compress(wanted, int(state["split"]), key)
        q = change.dense()
        payload = pack(view.iteration, 0, MessageFlag(0), x.dtype, data)
        outbox = (Multicast(tuple(view.column), payload),) if view.column else ()
        # q as receivers decode it: what quantisation and rounding took off is in the error, too.
        return {**state, "error": wanted - q, **begun(view, announced=q)}, outbox

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Finish the iteration: move by what the neighbours' messages differ from the own one."""
        if BEGUN + "ids" not in state:
            incoming(state, messages)  # none is due
            return state
        announced = state[BEGUN + "announced"]
        iteration, split = int(state[BEGUN + "iteration"]), int(state["split"])
        most = self._compressor.most(announced.size, split, announced.dtype)
        toward = np.zeros_like(announced)
        for source, weight, payload in incoming(state, messages):
            header, body = unpack(payload, most=most, dtype=announced.dtype)
            if header.flags or header.iteration != iteration:
                raise MessageError(f"node {source} sent {header}, expected a compressed model of iteration {iteration}")
            q = self._read(body, state, _key(0, iteration, source))
            # From the own q, not from x: the other end finds the same with the opposite sign, so the mean stays.
            toward += weight * (q - announced)
        # float: gamma as a numpy scalar would make float64 of a float32 model.
        return settled({**state, "x": state["x"] + float(self.gamma) * toward})

    def _read(self, data: memoryview, state: State, key: Key) -> Real:
        x = state["x"]
        return self._compressor.decode(data, x.size, int(state["split"]), x.dtype, key).dense()

    def facts(self, state: State) -> dict[str, float]:
        """Return the norm of what was not sent."""
        return {"innovation": float(np.linalg.norm(state["error"]))}


def _key(seed: int, iteration: int, node: int) -> Key:
    """Return the key of random draws in the compressor of ``node``. A reader of its message needs all of it except the
    seed."""
    return Key(seed, "gossip/deepsqueeze", iteration, node)
