"""Checkpoints: the server's state of a run in one file, from which an interrupted run continues exactly.

:func:`save` writes one; :class:`CheckpointFile` is for a run that makes one after each round, and writes what changed.

A run that is interrupted after a checkpoint and resumed gives the same bits as one that was not, on the in-process
engine, whose clients are in the file. On a deployment they are not: the model, the strategy and the ledger come back,
while nodes are as they were left, further than the server or, restarted without a state folder
(:mod:`fedcomp.clients.kept`), empty. A client of the drop-in pair that had answered the round which is made again gives
the same answer (:mod:`fedcomp.flower.state`); other updates that the server has forgotten go back into the clients'
memories. Which nodes begin anew is in the reports (``rolled_back``, ``fresh``). Nodes that have other ids now are
recognised by their partitions where :mod:`fedcomp.experiments.roll` is between strategy and grid.

No pickle: a checkpoint can be read without trusting it.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcomp import files
from fedcomp.errors import LayoutError
from fedcomp.flower import store
from fedcomp.flower.grid import in_process
from fedcomp.flower.growing import GrowingFile, is_growing, packed, read
from fedcomp.flower.ledger import TrafficLedger, TrafficLedgerError
from fedcomp.flower.records import read_array
from fedcomp.plain import PlainError
from fedcomp.stateful import Stateful, StatePart

T = TypeVar("T")

_KIND: Final = "checkpoint"
_NUMPY: Final = "numpy.ndarray"
_KINDS: Final = ((bool, np.bool_), Real, str, (bytes, bytearray), list, tuple, dict)
"""Kinds of values that may replace each other in a strategy's attributes; for all others the type decides. The order
matters, because a bool is a number in Python."""

_HISTORY: Final = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


class CheckpointError(store.StoreError):
    """A checkpoint is missing, damaged or from a newer release, or does not fit what it is applied to."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after one of its rounds.

    Attributes
    ----------
    server_round : int
        The last round that is complete.
    arrays : ArrayRecord
        The model after it.
    result : Result
        Metrics of all rounds so far.
    ledger : TrafficLedger or None
        The traffic ledger so far.
    extra : dict
        Whatever plain data the caller added.
    strategy_state, grid_state
        Opaque; see :meth:`apply`.
    """

    server_round: int
    arrays: ArrayRecord
    result: Result
    ledger: TrafficLedger | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    strategy_state: dict[str, Any] | None = None
    grid_state: bytes | dict[str, Any] | None = None

    def apply(self, strategy: Any = None, grid: Grid | None = None) -> None:
        """Put ``strategy`` and ``grid``, built as for a new run, into the state of the checkpoint.

        The checkpoint's attributes win over those the strategy was built with. A grid that has a ledger gets the
        stored one. An in-process grid sets its clients back, too. No other one does: the strategy then goes on under
        numbers that clients cannot know (:meth:`fedcomp.stateful.Stateful.renumber`), so that none of them answers
        from its memory, and updates that came after the checkpoint go back into theirs. :func:`resume` also stores
        these numbers, for a run that is interrupted again before it made another checkpoint.

        Raises
        ------
        ConfigError
            When the strategy's state is of no use without the clients'.
        CheckpointError
            When the strategy is of another class, something was not stored, or is not what it should be. Strategy and
            grid may then be half restored: build them again.
        GridError
            When the stored in-process grid is another one: of another seed, or of another number of nodes.
        """
        if strategy is not None:
            if self.strategy_state is None:
                raise CheckpointError("the checkpoint holds no strategy state; save it with strategy=...")
            restore_strategy(strategy, self.strategy_state)
            if grid is None or in_process(grid) is None:
                renumber_strategy(strategy)
        if grid is not None:
            if self.ledger is not None and hasattr(grid, "ledger"):
                grid.ledger = self.ledger
            if in_process(grid) is not None:
                if self.grid_state is None:
                    raise CheckpointError("the checkpoint holds no in-process grid; save it with grid=...")
                with _checked("the checkpoint's grid"):
                    grid.restore(self.grid_state)  # type: ignore[attr-defined]


def save(
    path: str | os.PathLike[str],
    *,
    server_round: int,
    arrays: ArrayRecord,
    strategy: Any = None,
    grid: Grid | None = None,
    ledger: TrafficLedger | None = None,
    result: Result | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint to ``path``, replacing an older one in one step: a crash leaves the old or the new file.

    Parameters
    ----------
    path : path
        The file.
    server_round : int
        The round that has just been completed.
    arrays : ArrayRecord
        The model after it.
    strategy : object, optional
        Its ``state_dict()`` is stored if it has one, else all attributes that are plain data.
    grid : Grid, optional
        An in-process grid, possibly metered, is stored whole. Of other engines nothing can be.
    ledger : TrafficLedger, optional
        Default: the grid's, if it has one.
    result : Result, optional
        Metrics so far.
    extra : mapping, optional
        Plain data of the caller's.

    Raises
    ------
    CheckpointError
        When the strategy holds state that is not plain data and has no ``state_dict()``.
    """
    value = _value(server_round, arrays, strategy, grid, ledger, result, extra)
    try:
        # All of it before the file is touched: what cannot be stored leaves the older checkpoint as it is.
        data = packed(value, _KIND)
    except store.StoreError as error:
        raise CheckpointError(str(error)) from error
    files.write(Path(path), *data)


class CheckpointFile:
    """The checkpoint of a run that is saved again and again: each time what has changed is written.

    Clients that were not asked since, reports of rounds that are over and rows of the ledger are in the file already
    (:mod:`fedcomp.flower.growing`). It takes at most three times what the checkpoint holds, and a round's changes; a
    crash leaves the former checkpoint or the new one. :func:`load` reads it.

    Parameters
    ----------
    path : path
        The file. What is there is replaced by the first :meth:`save`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = GrowingFile(Path(path), _KIND)

    def save(
        self,
        *,
        server_round: int,
        arrays: ArrayRecord,
        strategy: Any = None,
        grid: Grid | None = None,
        ledger: TrafficLedger | None = None,
        result: Result | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint; parameters and errors as of the function :func:`save`.

        Lasting values (:class:`fedcomp.flower.store.Lasting`) in ``extra`` are written once.
        """
        value = _value(server_round, arrays, strategy, grid, ledger, result, extra)
        try:
            self._file.write(value)
        except store.StoreError as error:
            raise CheckpointError(str(error)) from error


def _value(
    server_round: int,
    arrays: ArrayRecord,
    strategy: Any,
    grid: Grid | None,
    ledger: TrafficLedger | None,
    result: Result | None,
    extra: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the value in a checkpoint."""
    if ledger is None:
        ledger = getattr(grid, "ledger", None)
    return {
        "server_round": server_round,
        "arrays": arrays,
        "result": {name: getattr(result, name) if result is not None else {} for name in _HISTORY},
        "ledger": None if ledger is None else {"blocks": ledger.blocks(), "tables": ledger.tables()},
        "extra": dict(extra or {}),
        "strategy": None if strategy is None else capture_strategy(strategy),
        # Of the outermost wrapper: what a meter remembers of unanswered messages is its own, not the engine's.
        "grid": grid.dump() if grid is not None and in_process(grid) is not None else None,  # type: ignore[attr-defined]
    }


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint.

    Raises
    ------
    CheckpointError
        When there is none at ``path``, it is damaged or forged, or a newer release wrote it. What it takes to find out
        is in proportion to the file.
    """
    with _checked(f"checkpoint {os.fspath(path)!r}"):
        try:
            whole = None if is_growing(Path(path)) else Path(path).read_bytes()
            value = read(Path(path), _KIND) if whole is None else store.loads(whole, _KIND)
        except OSError as error:
            raise CheckpointError(f"cannot read checkpoint {os.fspath(path)!r}: {error.strerror or error}") from error
        server_round, arrays = _typed(value, "server_round", int), _typed(value, "arrays", ArrayRecord)
        # A bool is an int to isinstance, and True would resume after round 1.
        if server_round < 0 or isinstance(server_round, bool):
            raise CheckpointError(f"its server_round is {server_round!r}, expected a whole number >= 0")
        for name, array in arrays.items():
            # Flower reads an array when it is used: a damaged one would end the run in the middle of a round.
            if array.stype == _NUMPY:
                read_array(array, name, tuple(array.shape), array.dtype)
        return Checkpoint(
            server_round=server_round,
            arrays=arrays,
            result=Result(arrays=arrays, **{name: _history(value["result"][name], name) for name in _HISTORY}),
            ledger=None if value["ledger"] is None else _ledger(value["ledger"]),
            extra=_typed(value, "extra", dict),
            strategy_state=None if value["strategy"] is None else _typed(value, "strategy", dict),
            grid_state=value["grid"] if isinstance(value["grid"], bytes | None) else _typed(value, "grid", dict),
        )


def resume(path: str | os.PathLike[str], strategy: Any, grid: Grid) -> Checkpoint:
    """Load a checkpoint and apply it; return it.

    Where clients are not set back the strategy's new numbers are stored at once: two restarts from one checkpoint must
    not use the same ones.

    Raises
    ------
    CheckpointError, ConfigError, GridError
        As :func:`load` and :meth:`Checkpoint.apply`.
    """
    found = load(path)
    found.apply(strategy, grid)
    if in_process(grid) is None:
        save(
            path,
            server_round=found.server_round,
            arrays=found.arrays,
            strategy=strategy,
            ledger=found.ledger,
            result=found.result,
            extra=found.extra,
        )
    return found


@contextmanager
def _checked(what: str) -> Iterator[None]:
    """Turn every error in stored data into a :class:`CheckpointError` that names its position."""
    try:
        with store.reading(what):
            yield
    except (store.StoreError, LayoutError, TrafficLedgerError, PlainError) as error:
        # A grid's own errors say what to do by themselves.
        raise CheckpointError(f"{what} cannot be used: {error}") from error


def _typed(value: Mapping[str, Any], name: str, kind: type[T]) -> T:
    found = value[name]
    if not isinstance(found, kind):
        raise CheckpointError(f"its {name} is a {type(found).__name__}, expected {kind.__name__}")
    return found


def _ledger(stored: Mapping[str, Any]) -> TrafficLedger:
    # Earlier releases wrote the columns whole.
    blocks = stored["blocks"] if "blocks" in stored else [stored["columns"]]
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    return TrafficLedger.from_columns(columns, stored["tables"])


def _history(value: Any, name: str) -> dict[int, MetricRecord]:
    if not isinstance(value, dict) or not all(type(r) is int and isinstance(m, MetricRecord) for r, m in value.items()):
        raise CheckpointError(f"its {name} does not hold a MetricRecord per round")
    return value


def capture_strategy(strategy: Any) -> dict[str, Any]:
    """Return a strategy's state as plain data.

    ``state_dict()`` if the strategy has it. Otherwise every attribute that is plain data (numbers, arrays, records and
    containers of them: FedAdam's moments, FedAvgM's momentum, the adaptive clipping norm), with wrapped strategies
    inside; functions and immutable configuration are left to the constructor.

    Raises
    ------
    CheckpointError
        For an attribute that is neither: leaving it out would silently resume from something else.
    """
    state: dict[str, Any] = {"type": type(strategy).__qualname__}
    if callable(getattr(strategy, "state_dict", None)):
        state["state_dict"] = strategy.state_dict()
        return state
    attributes: dict[str, Any] = {}
    nested: dict[str, Any] = {}
    # Of the instance alone: what is on the class comes back with the class.
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            nested[name] = capture_strategy(value)
        elif store.is_plain(value):
            attributes[name] = value
        elif not _is_configuration(value):
            raise CheckpointError(
                f"{type(strategy).__name__}.{name} is a {type(value).__qualname__}, which cannot be stored; give the "
                "strategy state_dict() and load_state_dict()"
            )
    return {**state, "attributes": attributes, "nested": nested}


def restore_strategy(strategy: Any, state: Mapping[str, Any]) -> None:
    """Put ``strategy``, built as for a new run, into the state :func:`capture_strategy` returned.

    A strategy without ``state_dict()`` takes over attributes that it has already, of itself or by its class, and that
    are plain data there: any whole or real number in place of another, a value of the same type in place of any other,
    and any plain value where the attribute is None. So what such a strategy keeps from round to round has to be there
    when its constructor is done; with ``state_dict()`` it decides by itself.

    Raises
    ------
    CheckpointError
        When the state is of another class of strategy, or is not one that a strategy of this class has.
    """
    if state.get("type") != type(strategy).__qualname__:
        raise CheckpointError(
            f"the checkpoint is of strategy {state.get('type')!r}, this is {type(strategy).__qualname__!r}; resume "
            "with the strategy the run was started with"
        )
    with _checked(f"the checkpoint's {type(strategy).__qualname__}"):
        if callable(getattr(strategy, "state_dict", None)):
            strategy.load_state_dict(state["state_dict"])
            return
        attributes, nested = state["attributes"], state["nested"]
        # All checks before the first assignment, so that a state of another strategy does not restore half of this one.
        for name, value in attributes.items():
            _require_fits(name, _own(strategy, name), value)
        for name in nested:
            if not isinstance(_own(strategy, name), Strategy):
                raise CheckpointError(f"it holds a strategy as {name!r}, which is not a strategy here")
        for name, value in attributes.items():
            setattr(strategy, name, value)
        for name, inner in nested.items():
            restore_strategy(_own(strategy, name), inner)


def renumber_strategy(strategy: Any) -> None:
    """Let a restored strategy, and all that it wraps, go on under numbers that clients cannot have seen."""
    if isinstance(strategy, Stateful):
        strategy.renumber()
        return
    for inner in [value for value in vars(strategy).values() if isinstance(value, Strategy)]:
        renumber_strategy(inner)


INNER: Final = StatePart(
    lambda owner: capture_strategy(owner.inner),
    lambda owner, state: restore_strategy(owner.inner, state),
    lambda owner: renumber_strategy(owner.inner),
)
"""The state of the strategy that another one holds as ``inner``."""


def _own(strategy: Any, name: Any) -> Any:
    """Return a stored attribute of the strategy or its class without computing properties; Ellipsis if there is
    none."""
    # A forged state may name anything: __doc__ and __module__ hold plain texts, and are no state.
    if not isinstance(name, str) or name.startswith("__"):
        return ...
    # Static: a property would run code, and Compressed answers for its inner strategy's attributes.
    return inspect.getattr_static(strategy, name, ...)


def _require_fits(name: Any, own: Any, value: Any) -> None:
    """Raise if ``value`` cannot replace a strategy's ``own``."""
    if own is ... or not store.is_plain(own):
        raise CheckpointError(
            f"it would set {name!r}, which is not part of this strategy's state: it has no such attribute, or it is "
            "a method, a property, a function or configuration. Set what should be restored in the constructor, "
            "or give the strategy state_dict() and load_state_dict()"
        )
    # None stands for "not yet", as FedAdam's moments before the first round: anything plain may follow.
    if own is not None and _kind(own) != _kind(value):
        raise CheckpointError(
            f"it would set {name!r}, {type(own).__name__} in this strategy, to a {type(value).__name__}; resume with "
            "the strategy the run was started with"
        )


def _kind(value: Any) -> Any:
    return next((kind for kind in _KINDS if isinstance(value, kind)), type(value))


def _is_configuration(value: Any) -> bool:
    """Whether a value cannot change during a run: functions, patterns, frozen dataclasses, codecs."""
    frozen = dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen  # type: ignore[union-attr]
    return callable(value) or frozen or isinstance(value, re.Pattern) or hasattr(value, "get_config")
