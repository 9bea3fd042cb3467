"""SGP (stochastic gradient push): whole models over directed and changing graphs.

After Assran, Loizou, Ballas and Rabbat, "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019,
arXiv:1811.10792 (the authors' code was read):

    x <- P (x - lr g(z)),    w <- P w,    z = x / w,    w_0 = 1

The gradient is taken at the de-biased z and its step is applied to the numerator x. The authors' code leaves w out of
its messages on regular graphs with uniform weights, where it stays 1. Here it always travels, 8 bytes: a node cannot
know that nobody is missing at the others, and as soon as one is, w is not 1 any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcomp.gossip.base import GossipMessage, Gradient, Outbox, State, View
from fedcomp.gossip.pushsum import PushSum, credited, push_whole, read_whole
from fedcomp.rules import BelowOne, Inside, Int, NotNegative


@dataclass(frozen=True, repr=False, eq=False)
class SGP(PushSum):
    """Uncompressed push-sum with local gradient steps: the reference for compressed algorithms on directed graphs.

    Parameters
    ----------
    lr, momentum : float
        Of the local step, heavy ball.
    decay_over : int
        Iterations in which the step size falls to zero, along half a cosine; 0 keeps it. With unlike data and
        compressed messages a constant one leaves the nodes at a distance from each other.
    w_min : float
        A node with a smaller weight only receives: its quotient x / w is not to be trusted.
    w_start : float
        A node that joined makes no gradient step before its weight is larger.
    nodes : int
        Vertices of the graph, and so the total of all weights: a share that would take a node's weight above it is
        refused. 0: filled in from the graph when a run begins.

    Notes
    -----
    A message is the share of w (8 bytes) and the model in its own dtype; all out-neighbours with the same share get the
    same bytes. The closing phase sends the same messages: ``view.dense`` only leaves the gradient out.

    Examples
    --------
    A run fills in the number of nodes, which bounds what a node may be sent:

    >>> from fedcomp.gossip.topology import Exponential
    >>> SGP(lr=0.1, momentum=0.9).fitted(Exponential(8)).nodes
    8
    """

    name: ClassVar[str] = "sgp"

    lr: NotNegative = 0.1
    momentum: BelowOne = 0.0
    decay_over: Annotated[int, Int()] = 0
    w_min: Inside = 1e-3
    w_start: Inside = 0.05
    nodes: Annotated[int, Int()] = 0

    def send(self, state: State, gradient: Gradient | None, view: View) -> tuple[State, Outbox]:
        """Begin an iteration: the local step, and a share of the result to every out-neighbour."""
        local = self._local(state, gradient, view)
        # Too light a node keeps all it has; its edges rest, which push-sum bears in any iteration.
        return (state, ()) if local is None else push_whole(local, view)

    def receive(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Finish the iteration: add the shares that came, of whatever iteration they are."""
        now = state
        for message in messages:
            now = self._credit_whole(now, message)
        return self._guarded(now, state)

    def take_back(self, state: State, messages: Sequence[GossipMessage]) -> State:
        """Return the state after undelivered messages came back: their shares are the sender's again."""
        now = state
        for message in messages:
            # Not _credit_whole: its marks are those of other nodes' messages, and these are the node's own.
            _, share, x = read_whole(message, message.source, state)
            now = credited(now, x, share)
        return self._guarded(now, state)
