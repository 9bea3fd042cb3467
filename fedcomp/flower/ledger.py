"""The traffic ledger: the cost of every message, counted on serialised bytes.

Two figures per message, never mixed. *Payload* is what a codec produced (frames and array data). *Wire* is what a
deployment moves for it: every deflated object, the tree of their ids, and the metadata. The wire figure agrees with
Flower's own uplink counter to 0.14 % (measured); downlink acknowledgements, about 400 bytes a message, are Flower's
and not counted here.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, Final, Literal, Self

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, FedcompError, nearest
from fedcomp.flower._private import weigher
from fedcomp.flower.store import Lasting

Direction = Literal["up", "down"]
Link = Literal["hub", "peer"]
Value = Literal["payload", "wire", "messages"]

_VALUES: Final = ("payload", "wire", "messages")
_DIRECTIONS: Final = ("up", "down")
_LINKS: Final = ("hub", "peer")
_COLUMNS: Final = {"round": "<u4", "node": "<u4", "kind": "<u2", "payload": "<u8", "wire": "<u8"}
_TYPECODES: Final = {"<u2": "H", "<u4": "I", "<u8": "Q"}
_FORMAT: Final = "fedcomp.ledger/1"

BLOCK: Final = 4096
"""Rows that are stored together."""


class TrafficLedgerError(FedcompError, ValueError):
    """A stored ledger cannot be read."""


def wire_bytes(message: Message) -> int:
    """Return the bytes that cross a deployment's connection for ``message``.

    The sum over all distinct nested objects of their deflated length, the serialised tree of object ids, and the
    serialised metadata. Equal 5 MiB chunks count once, because Flower sends them once: never benchmark with zeros.
    Works before a message is sent and on messages of every engine; ids count with a deployment's 64 characters.
    """
    return weigher()(message)


class TrafficLedger:
    """One row per message, with totals by any column.

    Nodes appear by partition id once it is known (:meth:`identify`), by node id until then, since node ids differ in
    every run. The rows are columns, 26 bytes a row; nodes and kinds of message are indices into tables.

    Examples
    --------
    >>> ledger = TrafficLedger()
    >>> ledger.record(1, 0, "up", "train", payload=40, wire=300)
    >>> ledger.record(1, 1, "up", "train", payload=60, wire=320)
    >>> ledger.total("payload", direction="up"), ledger.by("node", "wire")
    (100, {0: 300, 1: 320})
    """

    def __init__(self) -> None:
        # array and not ndarray: a row is appended for every message, which has to be cheap.
        self._columns: dict[str, array[int]] = {name: array(_TYPECODES[dtype]) for name, dtype in _COLUMNS.items()}
        self._nodes: list[int] = []
        self._node_index: dict[int, int] = {}
        self._kinds: list[tuple[str, str, str]] = []
        self._kind_index: dict[tuple[str, str, str], int] = {}
        # By round, then by kind: payload, wire and messages. Totals are asked for again and again while rows are added.
        self._sums: dict[int, dict[int, list[int]]] = {}
        self._blocks: list[Lasting] = []

    def __len__(self) -> int:
        return len(self._columns["round"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrafficLedger) and self.to_json() == other.to_json()

    __hash__ = None  # type: ignore[assignment]

    def append(self, round: int, node: int, kind: tuple[str, str, str], payload: int, wire: int) -> None:
        """Add one row."""
        if kind not in self._kind_index:
            self._kind_index[kind] = len(self._kinds)
            self._kinds.append(kind)
        row = (round, self._index_of(node), self._kind_index[kind], payload, wire)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
        self._count(round, self._kind_index[kind], payload, wire, 1)

    def _count(self, round: int, kind: int, *amounts: int) -> None:
        sums = self._sums.setdefault(round, {}).setdefault(kind, [0, 0, 0])
        for place, amount in enumerate(amounts):
            sums[place] += amount

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return copies of the stored columns; ``node`` and ``kind`` are indices into :meth:`tables`."""
        return {name: self._view(name).copy() for name in _COLUMNS}

    def blocks(self) -> list[Lasting]:
        """Return the columns in blocks of rows, for a file that rows are written into once.

        Rows are added to the last block alone, which is then another value.
        """
        full = len(self) // BLOCK
        for number in range(len(self._blocks), full):
            self._blocks.append(Lasting(partial(self._rows, number * BLOCK, (number + 1) * BLOCK)))
        return [*self._blocks, Lasting(partial(self._rows, full * BLOCK, len(self)))]

    def _rows(self, start: int, stop: int) -> dict[str, NDArray[Any]]:
        return {name: self._view(name)[start:stop].copy() for name in _COLUMNS}

    def tables(self) -> dict[str, list[Any]]:
        """Return what the indices in :meth:`columns` stand for."""
        return {"nodes": list(self._nodes), "kinds": [list(kind) for kind in self._kinds]}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], tables: Mapping[str, Any]) -> Self:
        """Return the ledger whose :meth:`columns` and :meth:`tables` were given.

        Raises
        ------
        TrafficLedgerError
            When columns are missing, of unequal length, out of range, or point outside the tables.
        """
        try:
            ledger = cls()
            ledger._nodes = [int(node) for node in tables["nodes"]]
            ledger._kinds = [(str(d), str(t), str(link)) for d, t, link in tables["kinds"]]
            given = {name: np.asarray(columns[name]) for name in _COLUMNS}
        except (KeyError, TypeError, ValueError) as error:
            raise TrafficLedgerError(f"stored ledger is incomplete: {error!r}") from error
        shapes = {column.shape for column in given.values()}
        if len(shapes) != 1 or len(*shapes) != 1:
            raise TrafficLedgerError(
                f"columns of the stored ledger have shapes {sorted(shapes)}; expected lists of one length"
            )
        for direction, _, link in ledger._kinds:
            if direction not in _DIRECTIONS or link not in _LINKS:
                raise TrafficLedgerError(
                    f"the stored ledger has a kind {direction!r}, {link!r}; directions are {', '.join(_DIRECTIONS)}, "
                    f"links {', '.join(_LINKS)}"
                )
        for name, dtype in _COLUMNS.items():
            column = given[name]
            # Without rows a column from JSON is float64, numpy's type for an empty list.
            if len(column) and (column.dtype.kind not in "iu" or column.min() < 0):
                raise TrafficLedgerError(f"column {name!r} of the stored ledger does not hold non-negative integers")
            # astype() would wrap what is too large without a word.
            if len(column) and int(column.max()) > np.iinfo(dtype).max:
                raise TrafficLedgerError(f"column {name!r} of the stored ledger exceeds {dtype}")
            ledger._columns[name].frombytes(column.astype(dtype).tobytes())
        for name, table in (("node", ledger._nodes), ("kind", ledger._kinds)):
            if len(given[name]) and int(given[name].max()) >= len(table):
                raise TrafficLedgerError(
                    f"column {name!r} of the stored ledger points outside its table of {len(table)}"
                )
        # Node ids that were identified are not in the tables: the meter, restored too, names them by partition.
        ledger._node_index = {node: index for index, node in enumerate(ledger._nodes)}
        ledger._kind_index = {kind: index for index, kind in enumerate(ledger._kinds)}
        ledger._count_all()
        return ledger

    def _count_all(self) -> None:
        """Compute the sums of all rows."""
        amounts = np.stack([self._view("payload"), self._view("wire"), np.ones(len(self), "<u8")], axis=1)
        groups, inverse = np.unique(
            np.stack([self._view("round"), self._view("kind")], axis=1), axis=0, return_inverse=True
        )
        # 64 bits each: add.at() adds integers, where bincount() would add in float64.
        sums = np.zeros((len(groups), 3), np.uint64)
        np.add.at(sums, inverse.reshape(-1), amounts)
        for (round, kind), row in zip(groups.tolist(), sums.tolist(), strict=True):
            self._count(round, kind, *row)

    def to_json(self) -> dict[str, Any]:
        """Return the whole ledger as one JSON-able dictionary."""
        columns = {name: self._view(name).tolist() for name in _COLUMNS}
        return {"format": _FORMAT, **self.tables(), "columns": columns}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Return the ledger :meth:`to_json` described.

        Raises
        ------
        TrafficLedgerError
            When the document is not one, or damaged.
        """
        if not isinstance(document, Mapping) or document.get("format") != _FORMAT:
            raise TrafficLedgerError(f"not a ledger document: expected format {_FORMAT!r}")
        columns = document.get("columns")
        if not isinstance(columns, Mapping):
            raise TrafficLedgerError("stored ledger has no columns")
        return cls.from_columns(columns, document)

    def _index_of(self, node: int) -> int:
        index = self._node_index.get(node)
        if index is None:
            index = self._node_index[node] = len(self._nodes)
            self._nodes.append(node)
        return index

    def _view(self, name: str) -> NDArray[Any]:
        # An exported buffer forbids appending, so views never outlive the method that takes them.
        return np.frombuffer(self._columns[name], _COLUMNS[name])

    def __repr__(self) -> str:
        return (
            f"TrafficLedger({len(self)} messages, {self.total('wire', direction='up', link='hub')} bytes up, "
            f"{self.total('wire', direction='down', link='hub')} bytes down, "
            f"{self.total('wire', link='peer')} bytes between peers)"
        )

    def record(
        self,
        round: int,
        node: int,
        direction: Direction,
        message_type: str,
        link: Link = "hub",
        payload: int = 0,
        wire: int = 0,
    ) -> None:
        """Add one message.

        Parameters
        ----------
        round : int
            Server round the message belongs to, 0 for messages before the first.
        node : int
            Partition id, or node id while the partition is not known.
        direction : {"up", "down"}
            Towards the server, or from it. Of a message between two peers the sender's side is "up".
        message_type : str
            Flower's message type, e.g. ``train``.
        link : {"hub", "peer"}
            Whether the bytes crossed the link to the server or one between two clients.
        payload, wire : int
            Sizes in bytes.

        Raises
        ------
        ConfigError
            For an unknown direction or link, or a negative number.
        """
        if direction not in _DIRECTIONS:
            raise ConfigError(f"direction {direction!r} of a message is neither 'up' nor 'down'")
        if link not in _LINKS:
            raise ConfigError(f"link class {link!r} is neither 'hub' nor 'peer'")
        if min(round, node, payload, wire) < 0:
            raise ConfigError(
                f"round {round}, node {node}, payload {payload} and wire {wire} of a message must not be negative"
            )
        self.append(round, node, (direction, message_type, link), payload, wire)

    def identify(self, node_id: int, partition: int) -> None:
        """Let all rows of ``node_id``, past and future, count for ``partition``.

        A node that never had rows of its own and moves on to another partition leaves behind what was recorded for
        the former one: those rows may be another node's as well.
        """
        index = self._node_index.get(node_id)
        if index is not None:
            name = self._nodes[index]
            # The entry is this node's own: renaming it moves all its rows at once.
            if name == node_id or self._node_index.get(name) != index:
                self._nodes[index] = partition
                return
        self._node_index[node_id] = self._index_of(partition)

    def total(self, value: Value = "wire", **where: Any) -> int:
        """Return the sum of ``value`` over the rows that match.

        Parameters
        ----------
        value : {"payload", "wire", "messages"}
            Bytes of payload, bytes on the wire, or the number of messages.
        **where
            Any of ``round``, ``node``, ``direction``, ``message_type``, ``link``: one value or a collection of them.

        Raises
        ------
        ConfigError
            For an unknown value or column.
        """
        asked = {column: wanted for column, wanted in where.items() if wanted is not None}
        if "node" in asked:
            return int(self._values(value)[self._select(asked)].sum(dtype=np.int64))
        # Of all rows that share a round and a kind the sum is there already.
        place, every = _place(value), self._sums.keys()
        rounds = _accepted(asked.pop("round")) & every if "round" in asked else every
        kinds = self._kinds_where(asked)
        return sum(self._sums[each][kind][place] for each in rounds for kind in kinds & self._sums[each].keys())

    def by(self, column: str, value: Value = "wire", **where: Any) -> dict[Any, int]:
        """Return the totals of ``value`` for every distinct entry of ``column``, in ascending order.

        ``column`` is one of ``round``, ``node``, ``direction``, ``message_type``, ``link``; ``where`` as in
        :meth:`total`.
        """
        rows = self._select(where)
        codes, names = self._codes(column)
        chosen, inverse = np.unique(codes[rows], return_inverse=True)
        # bincount() would add in float64, which is exact below 2**53 only.
        sums = np.zeros(len(chosen), np.int64)
        np.add.at(sums, inverse, self._values(value)[rows].astype(np.int64))
        totals: dict[Any, int] = {}
        for code, amount in zip(chosen.tolist(), sums.tolist(), strict=True):
            name = code if names is None else names[code]
            # Codes may share a name: rows under a node's former id, and those under its partition.
            totals[name] = totals.get(name, 0) + amount
        return dict(sorted(totals.items()))

    def summary(self) -> dict[str, int]:
        """Return the standard figures: messages, payload and wire bytes, up and down, hub and peer."""
        figures: dict[str, int] = {"messages": len(self)}
        for direction in _DIRECTIONS:
            figures[f"payload_{direction}"] = self.total("payload", direction=direction, link="hub")
            figures[f"wire_{direction}"] = self.total("wire", direction=direction, link="hub")
        figures["payload_peer"] = self.total("payload", link="peer")
        figures["wire_peer"] = self.total("wire", link="peer")
        return figures

    def _values(self, value: str) -> NDArray[Any]:
        return np.ones(len(self), np.int64) if _place(value) == len(_VALUES) - 1 else self._view(value)

    def _kinds_where(self, where: Mapping[str, Any]) -> set[int]:
        """Return the numbers of the matching kinds of messages."""
        kinds = set(range(len(self._kinds)))
        for column, wanted in where.items():
            accepted = _accepted(wanted)
            kinds &= {kind for kind, name in enumerate(self._codes(column)[1] or ()) if name in accepted}
        return kinds

    def _codes(self, column: str) -> tuple[NDArray[Any], list[Any] | None]:
        """Return one integer per row and the meanings of the integers (None: the integers themselves)."""
        if column == "round":
            return self._view("round"), None
        if column == "node":
            return self._view("node"), self._nodes
        positions = {"direction": 0, "message_type": 1, "link": 2}
        if column not in positions:
            raise ConfigError(f"unknown column {column!r}{nearest(column, ('round', 'node', *positions))}")
        return self._view("kind"), [kind[positions[column]] for kind in self._kinds]

    def _select(self, where: Mapping[str, Any]) -> NDArray[np.bool_]:
        rows = np.ones(len(self), bool)
        for column, wanted in where.items():
            if wanted is None:
                continue
            accepted = _accepted(wanted)
            codes, names = self._codes(column)
            if names is not None:
                # Compared once per name, of which there are few, and not once per row.
                accepted = {code for code, name in enumerate(names) if name in accepted}
            rows &= np.isin(codes, list(accepted))
        return rows


def _accepted(wanted: Any) -> set[Any]:
    """Return one wanted entry, or a collection of them, as a set."""
    return set(wanted) if isinstance(wanted, Collection) and not isinstance(wanted, str) else {wanted}


def _place(value: str) -> int:
    if value not in _VALUES:
        raise ConfigError(f"unknown value {value!r}{nearest(value, _VALUES)}")
    return _VALUES.index(value)
