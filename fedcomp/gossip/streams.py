"""Streams of estimate updates: drafting and reading their messages, comparing numbers, transferring copies.

:mod:`fedcomp.gossip.estimates` says what all of it is for, and what the keys of the state mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from fedcomp.errors import StateError
from fedcomp.gossip.base import GossipMessage, Real, State, View
from fedcomp.gossip.compressor import Compressor, Delta
from fedcomp.gossip.errors import MessageError, OutOfStep
from fedcomp.gossip.packet import (
    MessageFlag,
    MessageHeader,
    all_finite,
    pack,
    peek,
    put_real,
    require_finite,
    take_real,
    unpack,
)
from fedcomp.rng import Key
from fedcomp.wire.bits import put_varint, take_varint
from fedcomp.wire.errors import WireError

DIGEST_BYTES: Final = 8
NO_FLAGS: Final = MessageFlag(0)
# A 64-bit number has at most ten bytes in LEB128.
_PREFIX: Final = 10
"""Largest size of the length prefix of a section."""

Compressors = Compressor | Callable[[int, MessageHeader], Compressor]


class Draft:
    """The messages of one stream in one iteration: what they have in common.

    Making it moves the own estimates in ``new``.
    """

    def __init__(
        self,
        new: State,
        targets: Mapping[str, Real],
        compressor: Compressor,
        view: View,
        to: int | None,
        flags: MessageFlag,
        alpha: float,
    ) -> None:
        self.header = (view.iteration, flags)
        self.before: dict[str, Real] = {}
        self.after: dict[str, Real] = {}
        self.deltas: dict[str, Delta] = {}
        self.digest = b""
        sections = []
        for name, target in targets.items():
            before = _own(new, name, to)
            # Refused here, before anything has left: a NaN in the neighbours' copies would stay there.
            require_finite(target, f"{name!r}")
            if target.dtype != before.dtype or target.shape != before.shape:
                raise StateError(
                    f"{name!r} is {target.dtype}{target.shape}; its estimate is {before.dtype}{before.shape}"
                )
            key = _key(view.seed, name, view.iteration, view.node, to)
            # An overflow leaves an infinity, which require_finite reports below with the name of the vector.
            with np.errstate(over="ignore"):
                section, delta = compressor.compress(target - before, int(new["split"]), key)
                after = before.copy()
                # The decoded change, not the innovation itself: it is what the receivers will add.
                delta.add_to(after, alpha)
            require_finite(after, f"the estimate of {name!r}")
            new[own_key(name, to)] = after
            self.before[name], self.after[name], self.deltas[name] = before, after, delta
            sections.append(section)
        # The last section ends with the message. So a single vector, the usual case, needs no length.
        self.sections = b"".join([put_varint(len(s)) + s for s in sections[:-1]] + sections[-1:])

    def sign(self) -> None:
        """Put the digest into the messages."""
        self.digest = digest_of(self.after.values())

    def write(self, number: int, extra: bytes, whole: bool) -> bytes:
        """Return message ``number`` of the stream."""
        iteration, flags = self.header
        flags |= (MessageFlag.DIGEST if self.digest else NO_FLAGS) | (MessageFlag.RESYNC if whole else NO_FLAGS)
        # From before the change: who gets it then applies the same sections as everybody else, by the same arithmetic.
        wholes = b"".join(map(put_real, self.before.values())) if whole else b""
        dtype = next(iter(self.before.values())).dtype
        return pack(iteration, number, flags, dtype, extra + self.digest + wholes + self.sections)


class Opened(NamedTuple):
    """A message's parts; ``wholes`` is empty without RESYNC, ``digest`` without DIGEST."""

    extra: bytes
    digest: bytes
    wholes: dict[str, Real]
    deltas: dict[str, Delta]


class Reader:
    """Reads messages of the vectors of one state; changes nothing."""

    def __init__(self, state: State, names: tuple[str, ...], compressor: Compressors, extra: int) -> None:
        self.names, self.extra = names, extra
        self.size, self.split = int(state[f"{names[0]}.size"]), int(state["split"])
        self.dtype = state[f"{names[0]}.start"].dtype
        self.copies = f"{names[0]}.sum" not in state
        # A broadcast stream has its own estimate from the beginning; streams per edge have theirs under other keys.
        self.edges = names[0] not in state
        self.compressor = compressor
        # Worked out once for all messages; a callable may return another compressor for each.
        self._longest = self._most(compressor) if isinstance(compressor, Compressor) else 0

    def _most(self, compressor: Compressor) -> int:
        """Return the size of the longest body in bytes."""
        # The longest body whatever its flags are: a longer one is refused by its length, before anything is read.
        section = compressor.most(self.size, self.split, self.dtype)
        return self.extra + DIGEST_BYTES + len(self.names) * (self.size * self.dtype.itemsize + _PREFIX + section)

    def open(self, message: GossipMessage) -> Opened:
        """Return the parts of ``message``, completely checked, its digest not compared."""
        header = peek(message.payload)
        compressor, most = self.compressor, self._longest
        if not isinstance(compressor, Compressor):
            compressor = compressor(message.source, header)
            most = self._most(compressor)
        _, body = unpack(message.payload, most=most, dtype=self.dtype)
        # Their bodies are whole models or numerators: read as a change they could pass for one by accident.
        if MessageFlag.DENSE in header.flags or MessageFlag.LEAVING in header.flags:
            raise MessageError(f"a message with flags {header.flags!r} came where a change of an estimate was expected")
        signed = MessageFlag.DIGEST in header.flags
        # Unchecked it would give a false sense of agreement; an honest sender with copies=False never signs.
        if signed and not self.copies:
            raise MessageError("a message has a digest, which a sum of copies cannot be compared with")
        extra, body = _cut(body, self.extra)
        digest, body = _cut(body, DIGEST_BYTES if signed else 0)
        wholes = {}
        for name in self.names if MessageFlag.RESYNC in header.flags else ():
            data, body = _cut(body, self.size * self.dtype.itemsize)
            wholes[name] = take_real(data, self.size, self.dtype)
        deltas = {}
        for name in self.names:
            # The last section gets all that is left; its decoder refuses bytes too many.
            data, body = (body, body[:0]) if name == self.names[-1] else _cut_prefixed(body)
            to = message.destination if self.edges else None
            # Seed 0 in place of the run's, which a receiver may not know: what both ends draw must not depend on it.
            key = _key(0, name, header.iteration, message.source, to)
            deltas[name] = compressor.decode(data, self.size, self.split, self.dtype, key)
        return Opened(bytes(extra), bytes(digest), wholes, deltas)


def _cut(body: memoryview, size: int) -> tuple[memoryview, memoryview]:
    if len(body) < size:
        raise MessageError(f"a message ends {size - len(body)} bytes early")
    return body[:size], body[size:]


def _cut_prefixed(body: memoryview) -> tuple[memoryview, memoryview]:
    try:
        size, start = take_varint(body, 0, len(body))
    except WireError as error:
        raise MessageError(f"the length of a section cannot be read: {error}") from error
    return _cut(body[start:], size)


def follows(header: MessageHeader, seen: Any, source: int) -> bool:
    """Return whether a message is to be applied; False for one that was applied before.

    Raises
    ------
    OutOfStep
        When it is neither the next one nor whole.
    """
    # A stream that was never heard of begins with message 0, in whatever iteration.
    expected, last, applied = (0, -1, 0) if seen is None else map(int, seen)
    if header.iteration <= last:
        # Numbers wrap at 65536: those less than half of that behind are old, and only as far back as messages were
        # applied since the last whole estimate, before which the same numbers may have meant another stream.
        if (expected - 1 - header.seq) & 0xFFFF < min(applied, 1 << 15):
            return False
    elif MessageFlag.RESYNC in header.flags or header.seq == expected:
        # A whole estimate replaces the copy, so a gap before it does not matter.
        return True
    raise OutOfStep(
        source,
        f"message {header.seq} of node {source}, iteration {header.iteration}, does not follow its last one: expected "
        f"message {expected} of an iteration after {last}. Its whole estimate mends this",
    )


def advance(new: State, names: tuple[str, ...], source: int, opened: Opened, alpha: float) -> dict[str, Real]:
    """Move the copies of ``source`` in ``new``; return them."""
    after = {}
    for name in names:
        key = copy_key(name, source)
        # The wholes were read into fresh arrays; anything else may be shared with older states.
        copy = opened.wholes[name] if opened.wholes else (new[key] if key in new else start_of(new, name)).copy()
        with np.errstate(over="ignore"):
            opened.deltas[name].add_to(copy, alpha)
        # Both summands are finite, but their sum need not be.
        if not all_finite(copy):
            raise MessageError(f"a message of node {source} takes the estimate {name!r} beyond the largest number")
        new[key] = after[name] = copy
    return after


def accumulate(new: State, names: tuple[str, ...], source: int, opened: Opened, fresh: bool, alpha: float) -> None:
    """Move the sums of weighted copies in ``new`` by one message of ``source``."""
    row = row_of(new, names[0])
    if source not in row:
        raise MessageError(f"a message of node {source}, which has no weight; expected one of {sorted(row)}")
    # The neighbour's old share of the sum is not kept anywhere, so it cannot be taken out.
    if opened.wholes and not fresh:
        raise OutOfStep(
            source,
            f"node {source} sent its whole estimate, which cannot replace a part of a sum; restart, or keep "
            "copies=True",
        )
    for name in names:
        total = new[f"{name}.sum"].copy()
        with np.errstate(over="ignore"):
            # The neighbour's beginning enters with its first message: open_estimates did not know the weights.
            if fresh:
                total += row[source] * (opened.wholes[name] if opened.wholes else start_of(new, name))
            opened.deltas[name].add_to(total, row[source] * alpha)
        if not all_finite(total):
            raise MessageError(f"a message of node {source} takes the sum of {name!r} beyond the largest number")
        new[f"{name}.sum"] = total


def remember(new: State, names: tuple[str, ...], view: View) -> None:
    """Store what later calls need of the iteration that begins."""
    # Ascending, in which order sums over neighbours are added: another order gives other bits.
    ids = np.array(sorted(view.row), np.int64)
    weights = np.array([view.row[int(j)] for j in ids], np.float64)
    old = new.get(f"{names[0]}.row")
    # Exactly equal: what is in a sum was multiplied by the old weights, and cannot be weighted again.
    same = np.array_equal(old, ids) and np.array_equal(new[f"{names[0]}.weights"], weights) if old is not None else True
    if f"{names[0]}.sum" in new and not same:
        raise StateError(
            f"neighbours or weights changed from {row_of(new, names[0])} to {dict(view.row)}; a sum of weighted copies "
            "holds for one row only. Keep single copies (copies=True), or restart"
        )
    for name in names:
        new[f"{name}.row"], new[f"{name}.weights"] = ids, weights
    new[f"{names[0]}.begun"] = np.array(view.iteration, np.int64)


def own_key(name: str, to: int | None = None) -> str:
    """Return the state's key of the own estimate: of the broadcast stream, or of the edge ``to``."""
    return name if to is None else f"{name}>{to}"


def copy_key(name: str, source: int) -> str:
    """Return the state's key of the copy of ``source``'s estimate."""
    return f"{name}/{source}"


def row_of(state: State, name: str) -> dict[int, float]:
    """Return the weights of the in-neighbours, by ascending id."""
    if f"{name}.row" not in state:
        return {}
    return dict(zip(state[f"{name}.row"].tolist(), state[f"{name}.weights"].tolist(), strict=True))


def start_of(state: State, name: str) -> Real:
    """Return where the estimates of ``name`` begin, shape (d,); not to be written to."""
    start = state[f"{name}.start"]
    return start if start.ndim else np.full(int(state[f"{name}.size"]), start)


def _own(state: State, name: str, to: int | None) -> Real:
    key = own_key(name, to)
    if key in state:
        return state[key]
    # Streams per edge alone make theirs later: that of a broadcast is there from the beginning.
    if to is None or name in state or f"{name}.start" not in state:
        raise StateError(f"no estimate {key!r} was opened; call open_estimates first, with the same kind of streams")
    # An edge that has not spoken yet: its estimate comes into being with the first message.
    return start_of(state, name)


def copy_of(state: State, name: str, source: int) -> Real:
    """Return the copy of ``source``'s estimate; raise StateError when there is none."""
    key = copy_key(name, source)
    if key not in state:
        raise StateError(f"nothing was received from node {source} yet, so that {name!r} has no copy of its estimate")
    return state[key]


def count(state: State, key: str) -> int:
    """Return a counter, 0 when it has not begun."""
    return int(state[key]) if key in state else 0


def _key(seed: int, name: str, iteration: int, node: int, to: int | None) -> Key:
    """Return the random stream of ``node`` for one section; receivers know all of it except the seed."""
    # Shifted by one: the broadcast stream has 0, and an edge to node 0 must not share its draws.
    return Key(seed, f"gossip/{name}", iteration, node, 0 if to is None else to + 1)


def digest_of(estimates: Iterable[Real]) -> bytes:
    """Return eight bytes that tell different estimates apart: BLAKE2b over their little-endian bytes, in order."""
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for vector in estimates:
        found.update(vector.astype(vector.dtype.newbyteorder("<"), copy=False).tobytes())
    return found.digest()


def belongs(key: str, name: str) -> bool:
    """Whether a key of a state is one of the estimates called ``name``."""
    return key == name or key.startswith((f"{name}/", f"{name}>", f"{name}."))
