"""Estimates that both ends of an edge hold bit for bit, for all algorithms that compress differences.

A sender keeps an estimate ẑ of what its neighbours know of its vector z, sends the compressed innovation
``q = C(z - ẑ)`` and adds the *decoded* q; so does every neighbour. Both hold the same bits as long as they begin with
the same value, add the same numbers in the same dtype and order, and apply every message exactly once and in order.
This module sees to it: messages of a stream are numbered, a duplicate is ignored, a gap is :class:`OutOfStep`, every
``digest_every``-th message carries eight bytes of digest of the estimate, and a whole estimate mends what broke.

Two kinds of streams:

broadcast
    One own estimate; every neighbour gets the same q and keeps a copy. Who missed a message (its edge rested, or it is
    new) gets the whole estimate with the next one.
edges
    One own estimate per out-neighbour, which rests when its edge does (Sparse-Push's edge mode).

Several named vectors may share a message (BEER sends two): their names are given together, always in one order; the
first one names the stream.

Keys of the state, for a vector called ``z``, first of its names, and neighbour 3:

=================  =====================================================================================
``split``          0-d int64: ``z[:split]`` is compressed, the rest travels whole
``z``              own estimate (broadcast)
``z>3``            own estimate of the edge to 3 (edges)
``z/3``            copy of what 3 estimates of itself
``z.start``        where all estimates begin: a vector, or 0-d when all elements are equal; every name has one
``z.sum``          ``sum_j W[i,j] ẑ_j`` in place of the copies (``copies=False``)
``z.seq``          0-d int64: messages of the broadcast stream so far
``z.seq>3``        0-d int64: messages sent along the edge to 3 (edges)
``z.sent/3``       0-d int64: how many messages of its stream 3 knows; -1: it needs the whole in any case
``z.seq/3``        int64 of shape (3,): next number expected from 3, iteration of its last message, messages
                   applied since its last whole estimate (or the beginning)
``z.row``          int64 ids of the in-neighbours of the last iteration begun, ascending (broadcast)
``z.weights``      float64 W[i,j] of each (broadcast)
``z.begun``        0-d int64: the iteration that was begun and not finished (broadcast)
``z.size``         0-d int64: elements of a vector
=================  =====================================================================================

Body of a message: extra bytes of the algorithm (a length both ends know), the digest (8, flag DIGEST), the whole
estimates before the change (flag RESYNC), and the changes; of several names all but the last with their length in
front (LEB128).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fedcomp.errors import ConfigError
from fedcomp.gossip.base import GossipMessage, Multicast, Outbox, Real, State, View
from fedcomp.gossip.compressor import Compressor, Delta
from fedcomp.gossip.errors import MessageError, OutOfStep
from fedcomp.gossip.packet import MessageFlag, MessageHeader, peek, require_finite
from fedcomp.gossip.streams import (
    DIGEST_BYTES,
    NO_FLAGS,
    Compressors,
    Draft,
    Reader,
    accumulate,
    advance,
    belongs,
    copy_key,
    copy_of,
    count,
    digest_of,
    follows,
    own_key,
    remember,
    row_of,
)

__all__ = [
    "DIGEST_BYTES",
    "Absorbed",
    "Received",
    "WrittenMessages",
    "absorb",
    "along_edge",
    "broadcast",
    "copy_key",
    "digests",
    "disagreement",
    "missed",
    "mixed",
    "open_estimates",
    "own_key",
    "retract",
]


class WrittenMessages(NamedTuple):
    """What a node knows after it has written.

    Attributes
    ----------
    state : State
        With the estimates advanced: ``state["z"]`` (or ``state["z>3"]``) is ẑ *after* this message.
    outbox : Outbox
    deltas : dict of str to Delta
        The decoded q of each name; ``.dense()`` is the vector.
    """

    state: State
    outbox: Outbox
    deltas: dict[str, Delta]


class Received(NamedTuple):
    """One message that was applied.

    Attributes
    ----------
    source : int
    header : MessageHeader
    extra : bytes
        The algorithm's own bytes of the message.
    deltas : dict of str to Delta
        The decoded q of each name.
    estimates : dict of str to ndarray
        The copies right after this message (a later message of the same source does not change them); empty with
        ``copies=False``.
    """

    source: int
    header: MessageHeader
    extra: bytes
    deltas: dict[str, Delta]
    estimates: dict[str, Real]


class Absorbed(NamedTuple):
    """The state after all messages, and those that were applied, in order; duplicates are not among them."""

    state: State
    received: tuple[Received, ...]


def open_estimates(
    state: State, starts: Mapping[str, Real], split: int, *, edges: bool = False, copies: bool = True
) -> State:
    """Return ``state`` with estimates that all begin at ``starts``.

    Parameters
    ----------
    state : State
    starts : mapping of str to ndarray, shape (d,)
        For each name the value at which *all* nodes' estimates of each other begin (zeros, or the common initial
        model), in the dtype of the model. Its order is the order of names in a message. When nodes begin with different
        values, everybody's first messages must be RESYNC messages (``view.resync``); that this was forgotten shows in
        the digest of the first message.
    split : int
        ``[:split]`` is compressed, the rest travels whole: ``layout.compressed_size``.
    edges : bool
        Streams per edge instead of one broadcast stream.
    copies : bool
        False keeps only ``sum_j W[i,j] ẑ_j``: one vector instead of one per neighbour. Then weights and neighbours may
        never change, no digest is sent, and no single copy can be replaced: what goes wrong ends in a reset.

    Raises
    ------
    ConfigError
        For ``edges=True, copies=False``, or starts of different shapes or dtypes.
    """
    first, *others = starts
    dtype, size = starts[first].dtype, starts[first].size
    if edges and not copies:
        raise ConfigError("copies=False keeps one sum of a broadcast's copies; streams per edge need their copies")
    if not 0 <= split <= size or any(starts[o].dtype != dtype or starts[o].size != size for o in others):
        raise ConfigError(f"estimates of {size} elements of {dtype} begin at vectors of one size and dtype, cut within")
    # Whatever an earlier opening left under these names goes, counters included: a stream that restarts counts from 0.
    new = {key: value for key, value in state.items() if not any(belongs(key, name) for name in starts)}
    new["split"] = np.array(split, np.int64)
    for name, start in starts.items():
        require_finite(start, f"the beginning of estimate {name!r}")
        new[f"{name}.size"] = np.array(size, np.int64)
        # Compared as bits: 0.0 and -0.0 are equal numbers but differ in a digest, so one must not stand for both.
        raw = start.view(f"u{start.itemsize}")
        new[f"{name}.start"] = np.array(start[0]) if size and (raw == raw[0]).all() else start.copy()
        # Streams per edge make theirs with their first message: which edges there will be is not known yet.
        if not edges:
            new[name] = start.copy()
        # Not the weighted beginnings yet: weights are known when an iteration begins, and accumulate adds them then.
        if not copies:
            new[f"{name}.sum"] = np.zeros(size, dtype)
    return new


def broadcast(
    state: State,
    targets: Mapping[str, Real],
    compressor: Compressor,
    view: View,
    *,
    extra: bytes | Mapping[int, bytes] = b"",
    flags: MessageFlag = NO_FLAGS,
    digest_every: int = 50,
    alpha: float = 1.0,
) -> WrittenMessages:
    """Advance the own estimates towards ``targets`` and write the messages that advance every copy by the same.

    Parameters
    ----------
    state : State
        Opened with :func:`open_estimates`; not modified.
    targets : mapping of str to ndarray, shape (d,)
        The vectors z; all the names that were opened, in that order.
    compressor : Compressor
        Of the innovation ``(z - ẑ)[:split]``.
    view : View
        Destinations are the keys of its ``column``; its ``row`` is remembered for :func:`disagreement` and
        :func:`absorb`. Destinations in ``view.resync``, and those that do not know every message of the stream so far,
        get RESYNC messages.
    extra : bytes, or mapping of destination to bytes
        Put in front of the body. Destinations with the same bytes share one multicast.
    flags : MessageFlag
        Further flags of the header (ZOOM, ...).
    digest_every : int
        Messages 0, R, 2R, ... of the stream carry a digest; 0: none does.
    alpha : float
        ``ẑ += alpha q``: LEAD's. Same on the side of the receivers.

    Returns
    -------
    WrittenMessages

    Raises
    ------
    NonFiniteUpdate
        When a target is not finite; nothing is sent.
    StateError
        With ``copies=False``, when weights or neighbours differ from the first iteration's.
    """
    first = next(iter(targets))
    new = dict(state)
    remember(new, tuple(targets), view)
    number = count(state, f"{first}.seq")
    message = Draft(new, targets, compressor, view, None, flags, alpha)
    # Message 0 is among them, so that nodes which began at different values are found out at once. A receiver that
    # keeps only a sum has no single estimate to compare.
    if digest_every and number % digest_every == 0 and f"{first}.sum" not in state:
        message.sign()
    groups: dict[bytes, list[int]] = {}
    written: dict[tuple[bool, bytes], bytes] = {}
    for j in sorted(view.column):
        own = extra if isinstance(extra, bytes) else extra[j]
        whole = j in view.resync or missed(state, first, j)
        # Neighbours in the same position get the same bytes: a whole estimate is serialised only once.
        if (whole, own) not in written:
            written[whole, own] = message.write(number, own, whole)
        groups.setdefault(written[whole, own], []).append(j)
        # Only for receivers of this message: a neighbour whose edge rests keeps its count and gets the whole later.
        new[f"{first}.sent/{j}"] = np.array(number + 1, np.int64)
    new[f"{first}.seq"] = np.array(number + 1, np.int64)
    outbox = tuple(Multicast(tuple(destinations), payload) for payload, destinations in groups.items())
    return WrittenMessages(new, outbox, message.deltas)


def missed(state: State, name: str, to: int) -> bool:
    """Whether ``to`` does not know all of the broadcast stream ``name``: the next message to it carries the whole."""
    # Both are 0 before the first message: nobody needs the whole then, since all estimates begin at the common start.
    return count(state, f"{name}.sent/{to}") != count(state, f"{name}.seq")


def along_edge(
    state: State,
    targets: Mapping[str, Real],
    compressor: Compressor,
    view: View,
    to: int,
    *,
    extra: bytes = b"",
    flags: MessageFlag = NO_FLAGS,
    digest_every: int = 50,
) -> tuple[State, Multicast, dict[str, Delta]]:
    """The same along one directed edge: advance ``z>to`` and write the one message.

    Call it for the active out-neighbours in ascending order. The edge's own estimate after the message is
    ``state[own_key("z", to)]``. Parameters and errors as :func:`broadcast`.
    """
    first = next(iter(targets))
    new = dict(state)
    number = count(state, f"{first}.seq>{to}")
    message = Draft(new, targets, compressor, view, to, flags, 1.0)
    if digest_every and number % digest_every == 0:
        message.sign()
    # Number and count differ after retract, which sets the count to -1: what the receiver holds is then not certain.
    payload = message.write(number, extra, to in view.resync or count(state, f"{first}.sent/{to}") != number)
    new[f"{first}.seq>{to}"] = new[f"{first}.sent/{to}"] = np.array(number + 1, np.int64)
    return new, Multicast((to,), payload), message.deltas


def absorb(
    state: State,
    messages: Sequence[GossipMessage],
    names: Sequence[str],
    compressor: Compressors,
    *,
    extra: int = 0,
    alpha: float = 1.0,
    complete: bool = True,
) -> Absorbed:
    """Advance the copies by messages of :func:`broadcast` or :func:`along_edge`, each exactly once and in order.

    Parameters
    ----------
    state : State
        Not modified, whatever happens.
    messages : sequence of GossipMessage
        In order of source, of one source in the order they were sent.
    names : sequence of str
        As opened.
    compressor : Compressor or callable
        The senders'. A callable gets (source, header) of each message that is applied and returns the compressor:
        for those whose parameters differ by sender and message (Dyna-COLD's scale).
    extra : int
        Bytes of the algorithm at the beginning of every body.
    alpha : float
        As in :func:`broadcast`.
    complete : bool
        Require exactly one applied message of every in-neighbour of the begun iteration, and of that iteration.
        Asynchronous algorithms pass False.

    Returns
    -------
    Absorbed

    Raises
    ------
    MessageError
        When bytes are not such a message; with ``complete``, when a message is missing, superfluous or of another
        iteration.
    OutOfStep
        When a message does not follow the last one of its stream, or the digest differs. ``source`` says whose.
    """
    names = tuple(names)
    # Shallow is enough: arrays are replaced, never written to, so an error half way leaves the caller's state intact.
    new = dict(state)
    reader = Reader(state, names, compressor, extra)
    row = row_of(state, names[0])
    begun = state.get(f"{names[0]}.begun")
    # The first step of a run has nothing to finish, and after the iteration is finished nothing more may come.
    if complete and begun is None:
        if messages:
            raise MessageError(f"{len(messages)} messages arrived, but no started iteration needs them")
        return Absorbed(state, ())
    received: list[Received] = []
    for message in messages:
        header = peek(message.payload)
        whole = MessageFlag.RESYNC in header.flags
        seen = new.get(f"{names[0]}.seq/{message.source}")
        # Before the body is read: a duplicate costs nothing, and with ``complete`` it does not count as superfluous.
        if not follows(header, seen, message.source):
            continue
        if complete and begun is not None and (message.source not in row or header.iteration != int(begun)):
            raise MessageError(
                f"a message of node {message.source} and iteration {header.iteration}; expected one of each of "
                f"{sorted(row)} and iteration {int(begun)}"
            )
        opened = reader.open(message)
        if reader.copies:
            after = advance(new, names, message.source, opened, alpha)
            # Signed after the change: this finds a wrong decoding as well as a copy that was wrong before.
            if opened.digest and opened.digest != digest_of(after.values()):
                raise OutOfStep(
                    message.source,
                    f"the estimate of node {message.source} is not what it holds itself: the digests of message "
                    f"{header.seq} differ; its whole estimate mends this",
                )
        else:
            after = {}
            accumulate(new, names, message.source, opened, seen is None, alpha)
        # The third number bounds how far back a sequence number may count as a duplicate: see follows.
        new[f"{names[0]}.seq/{message.source}"] = np.array(
            [(header.seq + 1) & 0xFFFF, header.iteration, 1 if whole or seen is None else int(seen[2]) + 1], np.int64
        )
        received.append(Received(message.source, header, opened.extra, opened.deltas, after))
    if complete:
        missing = sorted(set(row) - {r.source for r in received})
        if missing:
            raise MessageError(
                f"no message of iteration {int(begun or 0)} arrived from nodes {missing}, although one was due"
            )
        # From here on a second inbox for the same iteration is refused.
        del new[f"{names[0]}.begun"]
    return Absorbed(new, tuple(received))


def retract(
    state: State,
    messages: Sequence[GossipMessage],
    names: Sequence[str],
    compressor: Compressors,
    *,
    extra: int = 0,
) -> Absorbed:
    """Take back own messages of edge streams that were never delivered: the last ones of their edges.

    The edges' own estimates return to what they were before the messages (up to rounding: a subtraction undoes no
    addition exactly), and the next message along each such edge carries the whole estimate.

    Returns
    -------
    Absorbed
        ``received`` holds the messages newest first, with ``source`` the *destination* of the message and ``estimates``
        the edge's own estimate right after the message was written: what its mass share refers to.

    Raises
    ------
    MessageError
        When the bytes are not such a message.
    OutOfStep
        When a later message of the same edge is not taken back with it.
    """
    names = tuple(names)
    new = dict(state)
    reader = Reader(state, names, compressor, extra)
    received: list[Received] = []
    # Newest first: an estimate can only be wound back from its last message.
    for message in sorted(messages, key=lambda one: (-peek(one.payload).iteration, one.destination)):
        header, to = peek(message.payload), message.destination
        number = count(new, f"{names[0]}.seq>{to}")
        # The state counts without bound; a header has the number modulo 65536.
        if not number or header.seq != (number - 1) & 0xFFFF:
            raise OutOfStep(
                to,
                f"message {header.seq} to node {to} came back, but {number} were sent; the last ones come back first",
            )
        opened = reader.open(message)
        after = {name: new[own_key(name, to)] for name in names}
        for name in names:
            # A RESYNC message holds the exact estimate from before it. A subtraction may miss it by rounding, and the
            # receiver's copy with it: hence the whole estimate next time.
            before = opened.wholes.get(name)
            if before is None:
                before = after[name].copy()
                opened.deltas[name].add_to(before, -1.0)
            new[own_key(name, to)] = before
        new[f"{names[0]}.seq>{to}"] = np.array(number - 1, np.int64)
        # No message has this number: the next one along the edge carries the whole estimate.
        new[f"{names[0]}.sent/{to}"] = np.array(-1, np.int64)
        received.append(Received(to, header, opened.extra, opened.deltas, after))
    return Absorbed(new, tuple(received))


def disagreement(state: State, name: str) -> Real:
    """Return ``sum_j W[i,j] (ẑ_j - ẑ_i)`` over the in-neighbours of the begun iteration, ascending; shape (d,).

    Uses the own *estimate*, never the own vector itself. Before anything was begun: zeros.
    """
    if f"{name}.row" not in state:
        return np.zeros(int(state[f"{name}.size"]), state[f"{name}.start"].dtype)
    own = state[name]
    if f"{name}.sum" in state:
        # One subtraction for all neighbours. The two ends of an edge then cancel up to rounding, not bit for bit.
        return mixed(state, name) - float(state[f"{name}.weights"].sum()) * own
    total = np.zeros_like(own)
    for j, weight in row_of(state, name).items():
        # Difference first, then the weight: the other end finds the same term with the opposite sign, bit for bit.
        total += weight * (copy_of(state, name, j) - own)
    return total


def mixed(state: State, name: str) -> Real:
    """Return ``sum_j W[i,j] ẑ_j`` over the in-neighbours of the begun iteration, without the own share; shape (d,)."""
    if f"{name}.sum" in state:
        return state[f"{name}.sum"]
    total = np.zeros(int(state[f"{name}.size"]), state[f"{name}.start"].dtype)
    for j, weight in row_of(state, name).items():
        total += weight * copy_of(state, name, j)
    return total


def digests(state: State, names: Sequence[str]) -> dict[str, bytes]:
    """Return eight bytes for every estimate in ``state``: ``z``, ``z>3``, ``z/3``. Equal bytes, equal estimates."""
    # Not belongs(): keys with a dot (counters, weights, the beginning) are not estimates.
    mine = {key for key in state for name in names if key == name or key.startswith((f"{name}/", f"{name}>"))}
    return {key: digest_of((state[key],)) for key in sorted(mine)}
