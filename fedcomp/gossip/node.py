"""A node's half of the protocol: its memory, and what it does with an instruction. Knows no network and no framework.

:func:`handle` is a function of memory, instruction and the node's own data: it returns the new memory instead of
writing it, so that whatever breaks before the caller has stored it leaves the node as it was, and the same
instruction, which the relay repeats, does the same thing again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import NonFiniteUpdate, StateError
from fedcomp.gossip.base import Algorithm, Gradient, Outbox, Real, State, View
from fedcomp.gossip.errors import Diverged, StaleInstruction
from fedcomp.gossip.protocol import Instruction, NodeAnswer, Parts
from fedcomp.gossip.receiving import received, taken_back
from fedcomp.layout import Layout
from fedcomp.rng import Key

_STATE: Final = "state/"
_CHANGE: Final = "change"


class NodeData(Protocol):
    """A node's own data."""

    def gradient(self, z: Real, key: Key) -> Real:
        """Return the (stochastic) gradient at ``z``, same shape and dtype; ``key`` chooses the batch."""
        ...

    def change(self) -> Real | None:
        """Return how the forward pass of the last :meth:`gradient` moved parts of the model that follow no gradient
        (running statistics), shape ``(d,)``; None when there are none. Applied when the iteration is finished."""
        ...


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """All a node keeps between two instructions.

    Attributes
    ----------
    session, serial, epoch : str, int, int
        Of the last instruction carried out.
    state : State
        The algorithm's.
    answer : NodeAnswer
        Its last answer, repeated when it is asked again.
    change : ndarray, optional
        What the last forward pass did to running statistics; becomes part of the model when its iteration is finished.
    """

    session: str
    serial: int
    epoch: int
    state: State
    answer: NodeAnswer
    change: Real | None = None

    def to_parts(self) -> tuple[dict[str, NDArray[Any]], Parts]:
        """Return the memory as named arrays and as scalars and lists (of the answer, prefixed ``answer.``)."""
        arrays = {_STATE + name: array for name, array in self.state.items()}
        if self.change is not None:
            arrays[_CHANGE] = self.change
        parts = {"session": self.session, "serial": self.serial, "epoch": self.epoch}
        return arrays, parts | {f"answer.{name}": value for name, value in self.answer.to_parts().items()}

    @classmethod
    def from_parts(cls, arrays: Mapping[str, NDArray[Any]], parts: Mapping[str, Any]) -> NodeMemory:
        """Recreate a memory.

        Raises
        ------
        StateError
            When the parts are not those of a memory.
        """
        try:
            return cls(
                session=str(parts["session"]),
                serial=int(parts["serial"]),
                epoch=int(parts["epoch"]),
                state={n.removeprefix(_STATE): np.asarray(a) for n, a in arrays.items() if n.startswith(_STATE)},
                answer=NodeAnswer.from_parts(
                    {n.removeprefix("answer."): v for n, v in parts.items() if n.startswith("answer.")}
                ),
                change=arrays.get(_CHANGE),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is not the memory of a node: {type(error).__name__}: {error}") from error


def handle(
    algorithm: Algorithm,
    memory: NodeMemory | None,
    instruction: Instruction,
    local: NodeData | None,
    start: Real,
    layout: Layout,
    *,
    common: Real | None = None,
) -> tuple[NodeMemory | None, NodeAnswer]:
    """Carry out one instruction. Pure: ``memory`` is not modified, and nothing else remembers anything.

    Parameters
    ----------
    algorithm : Algorithm
        As announced for the session.
    memory : NodeMemory or None
        What the last call returned.
    instruction : Instruction
        From the relay; trusted as far as its numbers go, its messages are not.
    local : NodeData or None
        None: there is no gradient (consensus only).
    start : ndarray, shape (d,), float32 or float64
        The model with which this node begins or joins a run.
    layout : Layout
        The model's.
    common : ndarray, shape (d,), optional
        See :meth:`~fedcomp.gossip.Algorithm.init`; needed when ``start`` is not the same on all nodes.

    Returns
    -------
    NodeMemory or None, NodeAnswer
        What is to be stored before the answer leaves, and the answer.

    Raises
    ------
    StaleInstruction
        When a newer instruction of the session was carried out already. Nobody waits for an answer.
    """
    known = memory is not None and memory.session == instruction.session
    # First of all: it repeats the serial of the last instruction and would otherwise be answered from memory.
    if instruction.action == "observe":
        return memory, _observed(algorithm, memory if known else None, instruction)
    if memory is not None and known:
        # Already carried out, but the answer did not arrive. Doing it again would take the shares from this node twice.
        if instruction.serial == memory.serial:
            return memory, memory.answer
        if instruction.serial < memory.serial:
            raise StaleInstruction(
                f"node {instruction.node} has carried out instruction {memory.serial} of this run already; "
                f"instruction {instruction.serial} came too late"
            )
    # Whatever memory there is belongs to an earlier run or an earlier life, and must not be continued.
    if instruction.start in ("common", "empty"):
        joins = instruction.start == "empty"
        state = algorithm.join(start, layout) if joins else algorithm.init(start, layout, common=common)
        change = None
    elif memory is None or not _continues(memory, instruction):
        # Of a copy restored after a crash the relay has newer messages: going on with it would send a share twice.
        return memory, NodeAnswer(instruction.session, instruction.serial, fresh=True)
    else:
        state, change = memory.state, memory.change
    return _carry_out(algorithm, state, change, instruction, local, layout)


def _continues(memory: NodeMemory, instruction: Instruction) -> bool:
    # A reset is the only way into another epoch; without one this node missed the instruction that changed it.
    same_epoch = memory.epoch == instruction.epoch or instruction.start == "reset"
    return memory.session == instruction.session and memory.serial == instruction.serial - 1 and same_epoch


def _carry_out(
    algorithm: Algorithm,
    state: State,
    change: Real | None,
    instruction: Instruction,
    local: NodeData | None,
    layout: Layout,
) -> tuple[NodeMemory, NodeAnswer]:
    view = instruction.view
    # On the state from before: once they are counted, all messages look like repetitions.
    noticed = algorithm.noticed(state, instruction.inbox)
    state, change, refused, lost = _settled(algorithm, state, change, instruction)
    # After a refusal the relay begins another epoch, and the reset of that one does it.
    if instruction.start == "reset" and not refused:
        state = algorithm.reset(state, layout)
    outbox: Outbox = ()
    failed = ""
    if instruction.action == "leave":
        state, outbox = algorithm.leave(state, view)
    # A synchronous node cannot begin an iteration before the former one is finished.
    elif instruction.action == "step" and (algorithm.asynchronous or not refused):
        try:
            state, outbox = algorithm.send(state, _gradient(local, view), view)
            # After send, which takes the gradient: its forward pass is what moves the statistics.
            change = None if local is None or view.dense else local.change()
        # Answered, not raised: the inbox was applied, and only an answer acknowledges it.
        except (NonFiniteUpdate, Diverged) as error:
            # An error without a text is still a failure, and an empty ``failed`` says that all went well.
            failed = str(error) or type(error).__name__
    answer = NodeAnswer(
        instruction.session,
        instruction.serial,
        multicasts=tuple(outbox),
        needs=tuple(refused),
        reasons=tuple(refused.values()),
        lost=lost,
        # Refused messages are in ``needs``, with their reason.
        noticed=tuple((source, why) for source, why in sorted(noticed.items()) if source not in refused),
        failed=failed,
        facts=algorithm.facts(state),
    )
    return NodeMemory(instruction.session, instruction.serial, instruction.epoch, state, answer, change), answer


def _settled(
    algorithm: Algorithm, state: State, change: Real | None, instruction: Instruction
) -> tuple[State, Real | None, dict[int, str], tuple[str, ...]]:
    """Finish the iteration begun with ``state``: the inbox, running statistics, messages that came back.

    An iteration that cannot be finished, because one of its nodes is gone, is followed by a reset without one.

    Returns the state, what is left of ``change``, the sources whose messages were refused, with the reason, and why own
    messages that came back are lost.
    """
    # The relay has emptied the boxes because the iteration cannot be completed.
    dropped = instruction.start == "reset" and not instruction.inbox
    state, refused = (state, {}) if dropped else received(algorithm, state, instruction.inbox)
    # The change is kept: it belongs to the iteration, which is still open.
    if refused and not algorithm.asynchronous:
        return state, change, refused, ()
    state, lost = taken_back(algorithm, _shifted(algorithm, state, change), instruction.returned)
    return state, None, refused, lost


def _shifted(algorithm: Algorithm, state: State, change: Real | None) -> State:
    return state if change is None else algorithm.shift(state, change)


def _gradient(local: NodeData | None, view: View) -> Gradient | None:
    if local is None or view.dense:
        return None
    # Fixed by node and iteration: an instruction that is repeated after a crash draws the same batch.
    key = view.key("gradient")
    return lambda z: local.gradient(z, key)


def _observed(algorithm: Algorithm, memory: NodeMemory | None, instruction: Instruction) -> NodeAnswer:
    # A node that is ahead or behind would show a model of another iteration.
    if memory is None or memory.serial != instruction.serial or memory.epoch != instruction.epoch:
        return NodeAnswer(instruction.session, instruction.serial, fresh=True)
    state, _, refused, _ = _settled(algorithm, memory.state, memory.change, instruction)
    # Without some messages push-sum still has a valid model; a synchronous one would show half an iteration.
    failed = "; ".join(refused.values()) if refused and not algorithm.asynchronous else ""
    model = None if failed else algorithm.model(state)
    return NodeAnswer(instruction.session, instruction.serial, failed=failed, facts=algorithm.facts(state), model=model)
