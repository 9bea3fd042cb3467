"""What a client of a graph run keeps in its ``context.state``: rows of other owners, norms, and the last turn.

A turn is the training or the evaluation of one round. What it fetched and saw joins the rest only when another turn
begins. So a message of the same turn that arrives again finds what the first one found, plans the same steps and needs
the same rows. A client that has lost everything makes a plan that asks for more.

Cached rows and feature norms belong to the graph and stay from session to session; norms of hidden layers belong to one
session's model.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from flwr.app import ConfigRecord, Context
from numpy.typing import NDArray

from fedcomp.errors import FedcompError, StateError
from fedcomp.flower import store
from fedcomp.flower.gcn import PlanRequest
from fedcomp.flower.payload import put_frame, take_frame
from fedcomp.flower.records import to_arrays, to_record
from fedcomp.graphs.base import GraphPart, Ids
from fedcomp.graphs.cache import FeatureCache
from fedcomp.plain import from_plain, to_plain

Reals = NDArray[np.float64]

KEPT: Final = "fedcomp.gcn.kept"
KEPT_CACHE: Final = "fedcomp.gcn.kept.cache"
SECRET: Final = "fedcomp.gcn.secret"
SECRET_BYTES: Final = 32
"""Names of the records in a node's state, and the length of a secret."""


@dataclass(frozen=True)
class NodeValues:
    """A number for each of some nodes.

    Attributes
    ----------
    ids : ndarray of int64
        Ascending.
    values : ndarray of float64
    """

    ids: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    values: Reals = field(default_factory=lambda: np.zeros(0))

    def updated(self, other: NodeValues) -> NodeValues:
        """Return both together; where both know a node, ``other``'s number."""
        if not len(other.ids):
            return self
        # unique points to the first of equals: with ``other`` in front its number wins.
        ids, first = np.unique(np.concatenate([other.ids, self.ids]), return_index=True)
        return NodeValues(ids, np.concatenate([other.values, self.values])[first])


@dataclass(frozen=True)
class PastTurn:
    """What the last turn fetched and saw; see :attr:`fedcomp.flower.gcn.PlanRequest.turn`.

    Attributes
    ----------
    session : str
    number : int
    rows_of : str
        Names what the rows are; see :class:`OwnerState`.
    rows : mapping of int to bytes
        Frames of the feature rows that were fetched, by owner.
    used : ndarray of int64
        Cached rows it used.
    seen : tuple of NodeValues
        Norms of what nodes contributed to each hidden layer, first hidden layer first.
    """

    session: str
    number: int
    rows_of: str
    rows: Mapping[int, bytes] = field(default_factory=dict)
    used: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    seen: tuple[NodeValues, ...] = ()


@dataclass(frozen=True)
class StoredState:
    """What an owner keeps beside its cache.

    Attributes
    ----------
    digest : str
        Of the graph; see :class:`fedcomp.graphs.base.GraphPart`.
    norms : NodeValues
        Feature norms of other owners' nodes.
    session : str
        Whose model ``hidden`` is of.
    hidden : tuple of NodeValues
        Norms of hidden layers, as they were last seen.
    structure : tuple of (int, bytes)
        Rows of the adjacency that were sent for the turn ``structure_of``: owner and frame, in the order they came.
    structure_of : tuple of (str, int)
        Session and turn.
    last : PastTurn or None
        What is not part of the rest yet.
    """

    digest: str
    norms: NodeValues = field(default_factory=NodeValues)
    session: str = ""
    hidden: tuple[NodeValues, ...] = ()
    structure: tuple[tuple[int, bytes], ...] = ()
    structure_of: tuple[str, int] = ("", 0)
    last: PastTurn | None = None


@dataclass(frozen=True, kw_only=True)
class OwnerState(StoredState):
    """All of it, as it is at the beginning of a turn.

    Attributes
    ----------
    rows_of : str
        Names what is cached: digest, row codec and noise.
    cache : FeatureCache
        Its limit is kept to; the rows of the last turn are beside it, as they came.
    stored : bool
        Whether the cache is in the state as it is here.
    """

    rows_of: str
    cache: FeatureCache
    stored: bool = False

    @classmethod
    def load(cls, context: Context, ask: PlanRequest, part: GraphPart, reader: Reader) -> OwnerState:
        """Return what this node has at the beginning of the turn that ``ask`` is about. Modifies nothing.

        Parameters
        ----------
        reader : callable
            Returns ids and rows of a frame that was kept.

        Raises
        ------
        StateError
            When what is there cannot be read.
        """
        # As JSON, in which no two triples read the same.
        rows_of = json.dumps([part.digest, ask.row_codec, ask.noise])
        try:
            data = take_frame(context.state, KEPT)
            kept = None if data is None else from_plain(StoredState, store.loads(data, KEPT), "the state")
            # Of another graph or partition the whole state is void: its ids and norms say nothing here.
            if kept is None or kept.digest != part.digest:
                cache = FeatureCache(ask.cache, ask.cache_bytes, key=rows_of)
                return cls(part.digest, session=ask.session, rows_of=rows_of, cache=cache)
            held = to_arrays(context.state.array_records[KEPT_CACHE])
            # Empty when codec or noise are others now.
            cache = FeatureCache.from_arrays(held, ask.cache, ask.cache_bytes, key=rows_of)
            # Norms of hidden layers are of one session's model.
            hidden = kept.hidden if kept.session == ask.session else ()
            now = vars(kept) | {"session": ask.session, "hidden": hidden}
            return cls(**now, rows_of=rows_of, cache=cache, stored=len(cache) == len(held["ids"]))._at(ask, reader)
        # Damaged arrays fail in whatever way the first wrong one brings about.
        except (FedcompError, KeyError, ValueError, TypeError) as error:
            raise StateError(f"what this node keeps of the graph cannot be read: {error}; restart the node") from error

    def _at(self, ask: PlanRequest, reader: Reader) -> OwnerState:
        """Return this at the beginning of a turn: what another turn fetched and saw joins the rest."""
        last = self.last
        if last is None or (last.session, last.number) == (ask.session, ask.turn):
            return self
        cache, hidden = self.cache, self.hidden
        # With another codec or noise since, they are not the rows that owners would send now.
        if self.rows_of == last.rows_of:
            # In the order of use: what was cached before comes first, then what was fetched. Another limit since may
            # have left something out.
            cache.get(last.used[np.isin(last.used, cache.ids, assume_unique=True)])
            for frame in last.rows.values():
                cache.put(*reader(frame))
        # Norms that another run's model had say nothing of this one's.
        if last.session == self.session:
            longest = max(len(hidden), len(last.seen))
            hidden = tuple(_at(hidden, layer).updated(_at(last.seen, layer)) for layer in range(longest))
        return replace(self, cache=cache, hidden=hidden, last=None, stored=False)

    def received(self, ask: PlanRequest, norms: NodeValues, structure: Sequence[tuple[int, bytes]]) -> OwnerState:
        """Return this with feature norms and adjacency rows that a plan's message brought."""
        place = (ask.session, ask.turn)
        before = self.structure_at(ask)
        # A plan's message may arrive twice, and its rows must not be kept twice.
        more = tuple(frame for frame in structure if frame not in before)
        return replace(self, norms=self.norms.updated(norms), structure=before + more, structure_of=place)

    def lacks_norms(self, ask: PlanRequest) -> bool:
        """Whether this node was sent more feature norms than it has: then it has lost them."""
        return len(self.norms.ids) < ask.norms

    def structure_at(self, ask: PlanRequest) -> tuple[tuple[int, bytes], ...]:
        """Return the adjacency rows that were sent for the turn of ``ask``."""
        return self.structure if self.structure_of == (ask.session, ask.turn) else ()

    def save(self, context: Context) -> None:
        """Write all of it; the last thing a handler does."""
        data = store.dumps({each.name: to_plain(getattr(self, each.name)) for each in fields(StoredState)}, KEPT)
        # The cache is apart from the rest: it is by far the largest, and written only when it changed. It is also made
        # before anything is written: what cannot be made leaves the state as it was.
        cache = None if self.stored else to_record(self.cache.to_arrays())
        if cache is not None:
            context.state[KEPT_CACHE] = cache
        put_frame(context.state, KEPT, data)


Reader = Callable[[bytes], tuple[Ids, NDArray[Any]]]
"""``ids, rows = reader(frame)``."""


def _at(tables: Sequence[NodeValues], layer: int) -> NodeValues:
    return tables[layer] if layer < len(tables) else NodeValues()


def own_secret(context: Context) -> tuple[bytes, bool]:
    """Return the secret that this owner's noise comes from, and whether it is new; modifies nothing.

    Raises
    ------
    StateError
        When what is kept is not a secret.
    """
    held = context.state.config_records.get(SECRET)
    # Never from the run's seed, which everybody has.
    if held is None:
        return secrets.token_bytes(SECRET_BYTES), True
    secret = held.get("secret")
    if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:
        raise StateError("the secret that this owner's noise comes from is damaged; restart the node")
    return secret, False


def keep_secret(context: Context, secret: bytes) -> None:
    """Keep the secret in the state: noise that is redrawn at every fetch would average out."""
    context.state[SECRET] = ConfigRecord({"secret": secret})
