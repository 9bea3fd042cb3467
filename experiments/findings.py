"""The findings of an experiment: tables, curves, pictures, claims, and the answer to its question.

:func:`fedcomp.experiments.tables.findings` makes :class:`Findings`. They are plain data: they go into ``summary.json``
and come back from there unchanged; :mod:`fedcomp.experiments.page` and :mod:`fedcomp.experiments.console` show them.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcomp.measuring import Claim

Cell = str | int | float | None
"""One cell of a table; None was not measured."""

LONG = 24
"""Tables with more rows are folded away in the report and left out on the terminal."""


@dataclass(frozen=True)
class Series:
    """One line: its name and its points. Points that are not finite are left out."""

    name: str
    x: Sequence[float]
    y: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y values")
        for axis in ("x", "y"):
            # None is what JSON has for NaN.
            points = tuple(math.nan if value is None else float(value) for value in getattr(self, axis))
            object.__setattr__(self, axis, points)


@dataclass(frozen=True)
class Table:
    """Rows of cells under named columns. A column of numbers is set to the right; NaN and infinity become None.

    Parameters
    ----------
    title : str
    columns : sequence of str
    rows : sequence of sequences of str, int, float or None
        Each as long as ``columns``; the first cell names the row.
    caption : str
        What a reader must know to read it: units, what was averaged over what.

    Examples
    --------
    >>> Table("Cost", ["system", "bytes"], [["dense", 4000], ["top-k", 61]]).numeric
    (False, True)
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {len(self.columns)} columns, but a row {row!r}")
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "rows", tuple(tuple(map(_cell, row)) for row in self.rows))

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold nothing but numbers and gaps."""
        columns = zip(*self.rows, strict=True) if self.rows else ((),) * len(self.columns)
        return tuple(not any(isinstance(cell, str) for cell in column) for column in columns)


@dataclass(frozen=True)
class Curves:
    """A plot of lines.

    Parameters
    ----------
    title, x_label, y_label : str
    series : sequence of Series
        Colours and dashes go by their order; the first is drawn broad, as what the others are compared with.
    log_x, log_y : bool
        Logarithmic axes; what has no logarithm is left out.
    x_bytes : bool
        Whether x counts bytes and is to be written so.
    caption : str
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    x_bytes: bool = False
    caption: str = ""

    def __post_init__(self) -> None:
        lines = (Series(**line) if isinstance(line, Mapping) else line for line in self.series)
        object.__setattr__(self, "series", tuple(lines))


@dataclass(frozen=True)
class Pictures:
    """Small grey images in rows, such as what a generator makes of each class. Make one with :meth:`of`.

    Parameters
    ----------
    title : str
    row_labels : sequence of str
        One for each row.
    shape : sequence of four int
        Rows, columns, height and width of an image.
    pixels : str
        One byte a pixel, 0 black and 255 white, base64.
    caption : str
    """

    title: str
    row_labels: Sequence[str]
    shape: Sequence[int]
    pixels: str
    caption: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_labels", tuple(self.row_labels))
        object.__setattr__(self, "shape", tuple(self.shape))
        size = len(base64.b64decode(self.pixels, validate=True))
        if len(self.shape) != 4 or math.prod(self.shape) != size or len(self.row_labels) != self.shape[0]:
            raise ValueError(
                f"pictures {self.title!r}: {size} pixels and {len(self.row_labels)} row labels do not fit {self.shape}"
            )

    @classmethod
    def of(cls, title: str, images: NDArray[Any], row_labels: Sequence[str], caption: str = "") -> Pictures:
        """Return pictures of numbers in [0, 1], shape ``(rows, columns, height, width)``; what is beyond is cut off."""
        # NaN becomes black: its conversion to an integer is undefined.
        grey = np.rint(255.0 * np.clip(np.nan_to_num(images), 0.0, 1.0)).astype(np.uint8)
        return cls(title, row_labels, images.shape, base64.b64encode(grey.tobytes()).decode(), caption)

    @property
    def images(self) -> NDArray[np.uint8]:
        """Pixels, uint8 ``(rows, columns, height, width)``."""
        return np.frombuffer(base64.b64decode(self.pixels), np.uint8).reshape(self.shape)


Figure = Curves | Pictures


@dataclass(frozen=True)
class Findings:
    """What an experiment found.

    Parameters
    ----------
    tables : sequence of Table
    figures : sequence of Curves or Pictures
    claims : sequence of Claim
        Names are unique.
    answer : str
        The answer to the experiment's question: one or two sentences whose every figure is measured.
    tasks : sequence of mappings
        :meth:`fedcomp.tasks.base.Task.record` of every task used, so that the report says which data it rests on.
    statements : mapping of str to mapping
        :meth:`fedcomp.privacy.statement.Statement.to_json` of every private training measured, by what it is called in
        the tables: no epsilon is shown without it. Those of rows are known.
    """

    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    claims: Sequence[Claim] = ()
    answer: str = ""
    tasks: Sequence[Mapping[str, Any]] = ()
    statements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tables", "figures", "claims"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "tasks", tuple(dict(task) for task in self.tasks))
        object.__setattr__(self, "statements", {str(key): dict(said) for key, said in self.statements.items()})

    def __bool__(self) -> bool:
        return bool(self.tables or self.figures)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary; NaN and infinity, which JSON lacks, become None."""
        figures = [{"kind": type(figure).__name__.lower(), **asdict(figure)} for figure in self.figures]
        return {
            "tables": [asdict(table) for table in self.tables],
            "figures": finite(figures),
            "claims": finite([claim.to_json() for claim in self.claims]),
            "answer": self.answer,
            "tasks": list(self.tasks),
            **({"statements": dict(self.statements)} if self.statements else {}),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Findings:
        """Read :meth:`to_json`'s dictionary."""
        kinds = {kind.__name__.lower(): kind for kind in (Curves, Pictures)}
        figures = [dict(figure) for figure in document["figures"]]
        found = {
            "tables": [Table(**table) for table in document["tables"]],
            "figures": [kinds[figure.pop("kind")](**figure) for figure in figures],
            "claims": [Claim.from_json(claim) for claim in document.get("claims", ())],
        }
        return cls(**{**document, **found})


class Say:
    """What a measurement is given: it reports progress, and it keeps what is finished.

    Parameters
    ----------
    tell : callable, optional
        Receives one line of text.
    kept : mapping, optional
        Cells that were finished before an interruption, by name.
    keep : callable, optional
        Receives name and content of each newly finished cell, to store them.
    progress : callable, optional
        Receives how many cells are finished and how many are known, whenever one of them changes.

    Examples
    --------
    >>> say = Say(progress=lambda done, known: print(f"{done} of {known}"))
    >>> say.expect(["top-k/seed 0", "top-k/seed 1"])
    0 of 2
    >>> say("1 of 2: top-k")
    >>> say.cell("top-k/seed 0", lambda: {"loss": 0.25})
    1 of 2
    {'loss': 0.25}
    """

    def __init__(
        self,
        tell: Callable[[str], object] | None = None,
        kept: Mapping[str, Any] | None = None,
        keep: Callable[[str, Any], object] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self._tell = tell
        self._kept = dict(kept or {})
        self._keep = keep
        self._progress = progress
        self._known: set[str] = set()

    def __call__(self, text: str) -> None:
        """Show one line of progress."""
        if self._tell is not None:
            self._tell(text)

    def expect(self, names: Iterable[str]) -> None:
        """Announce cells that will be asked for, so that the time left can be estimated; a sweep announces all of its
        own before the first."""
        self._known |= set(names)
        if self._progress is not None:
            self._progress(len(self._known & self._kept.keys()), len(self._known))

    def has(self, name: str) -> bool:
        """Whether the cell ``name`` is finished."""
        return name in self._kept

    def cell(self, name: str, make: Callable[[], Any]) -> Any:
        """Return ``make()``, or what it returned before the run was interrupted.

        Parameters
        ----------
        name : str
            Names the cell within this run, whose configuration never changes: system, data, seed.
        make : callable
            Returns JSON-able data. What comes back is what JSON keeps of it, so that a resumed run computes with the
            same values: tuples are lists, keys are text. NaN and infinity stay what they are.
        """
        if name not in self._kept:
            made = json.loads(json.dumps(make(), default=_encodable))
            if self._keep is not None:
                self._keep(name, made)
            self._kept[name] = made
            self.expect([name])
        return self._kept[name]


def mean(values: Iterable[float]) -> float:
    """Return the mean of finite numbers, NaN of none or when one is not finite."""
    found = list(values)
    return math.fsum(found) / len(found) if found and all(map(math.isfinite, found)) else math.nan


def largest(values: Iterable[float]) -> float:
    """Return the largest, NaN of none or when one is NaN: ``max`` would pass over it, depending on its place."""
    found = list(values)
    return max(found) if found and not any(map(math.isnan, found)) else math.nan


def spread(values: Iterable[float]) -> float:
    """Return half the distance between the largest and the smallest of a few repetitions, NaN of none."""
    found = list(values)
    return (max(found) - min(found)) / 2 if found and all(map(math.isfinite, found)) else math.nan


def different_bytes(first: Mapping[str, NDArray[Any]], second: Mapping[str, NDArray[Any]]) -> int:
    """Return how many bytes of two models differ; every byte counts when names, their order, shapes or types do."""
    pairs = list(zip(first.values(), second.values(), strict=False))
    if list(first) != list(second) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return sum(array.nbytes for array in first.values())
    # Bytes and not values: NaN differs from itself, and -0.0 equals 0.0.
    raw = ([np.frombuffer(array.tobytes(), np.uint8) for array in pair] for pair in pairs)
    return sum(int(np.count_nonzero(a != b)) for a, b in raw)


def finite(value: Any) -> Any:
    """Return ``value`` with every NaN or infinity replaced by ``None`` and numpy scalars by Python's."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _encodable(value: Any) -> Any:
    """Return what JSON's encoder does not know as something that it does: scalars of numpy, mappings."""
    if isinstance(value, Mapping):
        return dict(value)
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"a finished cell holds a {type(value).__name__}, which JSON does not know")


def _cell(value: Any) -> Any:
    """Return one cell as plain Python data."""
    plain = finite(value)
    if isinstance(plain, bool):
        return "yes" if plain else "no"
    if plain is not None and not isinstance(plain, str | int | float):
        raise TypeError(f"a cell holds text, a number or None, not a {type(value).__name__}")
    return plain
