"""The folder of a run: its request, every finished round, the results, the summary and the report.

::

    runs/20260131-142501-quickstart/
        config.json     what was asked: configuration and one spec per row
        rounds.jsonl    one line per finished round, written and flushed at once
        systems/<row>/  result.json and arrays.npz of a finished row, the checkpoint of an unfinished one, and
                        privacy.jsonl: what a private row released, on disk before it was released
        cells.jsonl     one line per finished part of a measurement
        sessions.jsonl  one line per session that worked on the run: when it began and how long it took
        summary.json    rows, claims and environment, once all rows are finished
        report.html     the same for a reader
        log.txt         what Flower and Python warnings said

Files that are replaced are written beside their place and moved into it, so that an interruption at any
moment leaves either the old or the new one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcomp.errors import ConfigError, StateError, naming, nearest
from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.findings import finite
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import PRIVACY_FILE, RESULT_FILE, RoundRecord, RunResult, RunSpec
from fedcomp.files import write

if TYPE_CHECKING:
    from typing import Self

FORMAT = 2
LAST = "last"


class RunFolder:
    """One run on disk.

    Parameters
    ----------
    path : Path
        The run's own folder; use :meth:`create` or :meth:`find` instead of the constructor.
    config : Config
    specs : sequence of RunSpec
        One per row, in the order of the table.
    definition : str
        That of the experiment when the run was started: what is resumed later holds parts that were made by it.
    """

    def __init__(self, path: Path, config: Config, specs: Sequence[RunSpec], definition: str = "") -> None:
        self.path = path
        self.definition = definition
        self.config = config
        self.specs = list(specs)
        self._rounds, self._cells, self._sessions = (
            JsonLines(path / f"{name}.jsonl") for name in ("rounds", "cells", "sessions")
        )
        self._opened = datetime.now(UTC), time.perf_counter()
        # The index keeps apart labels that share a slug, and lists the folders in the order of the table.
        self._slugs = {spec.label: f"{i:02d}-{slug(spec.label)}" for i, spec in enumerate(self.specs)}

    @classmethod
    def create(cls, root: Path, config: Config, specs: Sequence[RunSpec], definition: str = "") -> Self:
        """Make a new folder below ``root`` and write ``config.json`` into it."""
        folder = cls(_new_directory(root, config.experiment), config, specs, definition)
        folder.keep(config, specs)
        return folder

    def keep(self, config: Config, specs: Sequence[RunSpec]) -> None:
        """Write what is asked into ``config.json``; rows keep their labels and places."""
        self.config, self.specs = config, list(specs)
        document = {"format": FORMAT, "config": config.to_json(), "specs": [spec.to_run_config() for spec in specs]}
        document["definition"] = self.definition
        write_text(self.path / "config.json", to_json_text(document) + "\n")

    @classmethod
    def find(cls, root: Path, run: str) -> Self:
        """Open a run by path, by its name below ``root``, or the newest one when ``run`` is ``"last"``.

        Raises :class:`ConfigError` that names the nearest run when there is none, and :class:`StateError`
        when its ``config.json`` cannot be read.
        """
        path = locate_run(root, run)
        file = path / "config.json"
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise StateError(
                    f"{file} has format {document['format']}, this version reads {FORMAT}; start a new run"
                )
            specs = [RunSpec.from_run_config(spec) for spec in document["specs"]]
            return cls(path, Config.from_json(document["config"]), specs, document.get("definition", ""))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{file} cannot be read ({' '.join(str(error).split())}); start a new run") from error

    @property
    def name(self) -> str:
        """The folder's own name, what ``--resume`` takes."""
        return self.path.name

    def require_same(self, experiment: Experiment, config: Config, specs: Sequence[RunSpec]) -> None:
        """Raise :class:`ConfigError` unless ``config`` and ``specs`` are those the run was started with.

        Settings that change no figure may differ.
        """
        other = f"run {self.name} was started by another version of experiment {experiment.name!r}"
        if set(self.config.settings) != set(config.settings):
            raise ConfigError(f"{other}: its settings have other names; start a new run")
        sizes = ("engine", "rounds", "clients", "seed")
        pairs = {f"--{name}": (getattr(self.config, name), getattr(config, name)) for name in sizes}
        options = (key for key, option in sorted(experiment.options.items()) if not option.neutral)
        pairs |= {key: (self.config.settings[key], config.settings[key]) for key in options}
        for field, (before, now) in pairs.items():
            if before != now:
                raise ConfigError(
                    f"run {self.name} was started with {field}={before}, not {now}; "
                    "resume without it, or start a new run"
                )
        if list(specs) != self.specs:
            raise ConfigError(f"{other}: its rows differ; start a new run")

    def append(self, spec: RunSpec, record: RoundRecord) -> None:
        """Add one finished round to ``rounds.jsonl``; it is on disk when this returns."""
        self._rounds.append(_round_line(spec, record))

    def rounds(self) -> dict[str, list[RoundRecord]]:
        """Return the rounds recorded so far, by label and in order.

        A round that was repeated after an interruption counts once, with its last line.
        """
        found: dict[str, dict[int, RoundRecord]] = {spec.label: {} for spec in self.specs}
        for document in self._rounds:
            label = document.pop("label")
            document.pop("system")
            if label in found:
                found[label][document["round"]] = RoundRecord.from_json(document)
        return {label: [records[i] for i in sorted(records)] for label, records in found.items()}

    def keep_cell(self, name: str, content: Any) -> None:
        """Add one finished part of a measurement to ``cells.jsonl``; it is on disk when this returns."""
        self._cells.append({"cell": name, "content": content})

    def cells(self) -> dict[str, Any]:
        """Return the finished parts of a measurement by name."""
        return {document["cell"]: document["content"] for document in self._cells}

    def sessions(self) -> list[tuple[str, float]]:
        """Return when each session on this run began (UTC) and its seconds, this one last and as far as it is.

        A session that was killed left no line and is missing.
        """
        began, clock = self._opened
        before = [(line["began"], line["seconds"]) for line in self._sessions]
        return [*before, (began.strftime("%Y-%m-%d %H:%M:%S UTC"), time.perf_counter() - clock)]

    def end_session(self) -> None:
        """Write down how long this session took."""
        began, seconds = self.sessions()[-1]
        self._sessions.append({"began": began, "seconds": seconds})

    def tidy(self) -> None:
        """Leave only whole lines in the files that grow line by line; called when a run is opened again."""
        # No file is made where there is none: discard_if_empty takes its presence for something recorded.
        if cells := self.cells():
            self._cells.replace({"cell": name, "content": content} for name, content in cells.items())
        rounds = self.rounds()
        if lines := [_round_line(spec, record) for spec in self.specs for record in rounds[spec.label]]:
            self._rounds.replace(lines)

    def row(self, spec: RunSpec) -> RowFolder:
        """Return the folder of one row, made when needed."""
        folder = self.path / "systems" / self._slugs[spec.label]
        folder.mkdir(parents=True, exist_ok=True)
        return RowFolder(folder)

    def discard_if_empty(self) -> bool:
        """Remove a run in which nothing was recorded, and nothing released; return whether it was removed."""
        if any((self.path / name).exists() for name in ("rounds.jsonl", "cells.jsonl")):
            return False
        # Below the header of a ledger is what was released, also where no round was finished.
        if any(path.read_bytes().count(b"\n") > 1 for path in self.path.glob(f"systems/*/{PRIVACY_FILE}")):
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        return True


class RowFolder:
    """The folder of one row of a run.

    Attributes
    ----------
    path : Path
    checkpoint : Path
        Where the engine keeps what it needs to continue this row.
    privacy : Path
        Where a private row keeps what it released; the file outlives the row's checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.checkpoint, self.privacy = path, path / "checkpoint", path / PRIVACY_FILE

    def save(self, result: RunResult) -> None:
        """Store the finished row and forget its checkpoint."""
        # Result first: a crash in between leaves a checkpoint nobody reads; the other order would lose the row.
        result.save(self.path)
        for path in self.path.glob(self.checkpoint.name + "*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def load(self) -> RunResult | None:
        """Return the stored result, ``None`` when the row is not finished."""
        return RunResult.load(self.path) if (self.path / RESULT_FILE).exists() else None


@dataclass(frozen=True)
class JsonLines:
    """A file that grows by one JSON document a line; a line that a crash cut short is ignored.

    JSON has no NaN and no infinity: they are written as ``{"float": "nan"}``, and read as what they were.
    """

    path: Path

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the documents; none when there is no such file."""
        # json.dumps escapes everything but ASCII, so splitlines() finds no line end inside a document.
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else ():
            try:
                yield json.loads(line, object_hook=_unmarked)
            except ValueError:
                continue

    def append(self, document: Mapping[str, Any]) -> None:
        """Add a document; it is on disk when this returns."""
        with naming(self.path), self.path.open("ab+") as file:
            if file.tell():
                # A line that a crash cut short must not swallow this one.
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.write(b"\n")
            file.write(_line(document).encode())
            file.flush()
            # A run that a power failure ends must not lose the rounds that it has reported.
            os.fsync(file.fileno())

    def replace(self, documents: Iterable[Mapping[str, Any]]) -> None:
        """Put these documents in place of all others, in one step."""
        write_text(self.path, "".join(map(_line, documents)))


def _line(document: Mapping[str, Any]) -> str:
    def marked(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: marked(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [marked(each) for each in value]
        return {"float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(marked(document), allow_nan=False) + "\n"


def _unmarked(value: dict[str, Any]) -> Any:
    return float(value["float"]) if value.keys() == {"float"} else value


def locate_run(root: Path, run: str) -> Path:
    """Return the folder of a run by path, by its name below ``root``, or the newest one for ``"last"``."""
    names = sorted(path.name for path in root.iterdir() if (path / "config.json").exists()) if root.is_dir() else []
    if run == LAST:
        if not names:
            raise ConfigError(f"there is no run in {root}")
        # The name, which begins with the time, breaks ties on file systems with coarse time stamps.
        return root / max(names, key=lambda name: ((root / name / "config.json").stat().st_mtime_ns, name))
    for path in (root / run, Path(run)):
        if (path / "config.json").exists():
            return path
    raise ConfigError(f"no run {run!r} in {root}{nearest(run, names)}")


def _round_line(spec: RunSpec, record: RoundRecord) -> dict[str, Any]:
    return {"label": spec.label, "system": spec.system, **finite(record.to_json())}


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` in one step."""
    # Names of folders need not be UTF-8: Python has surrogates for such bytes, which are written as JSON has them.
    write(path, text.encode("utf-8", "backslashreplace"), mode=0o666)


def to_json_text(document: Mapping[str, Any]) -> str:
    """Return ``document`` as strict JSON: NaN and infinity, which JSON lacks, become ``null``."""
    return json.dumps(finite(document), indent=2, allow_nan=False, ensure_ascii=False)


def _new_directory(root: Path, name: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    try:
        root.mkdir(parents=True, exist_ok=True)
        for attempt in itertools.count(1):
            path = root / (f"{stamp}-{name}" if attempt == 1 else f"{stamp}-{name}-{attempt}")
            # No exist_ok: of two runs started in the same second, only one gets the name.
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as error:
        raise ConfigError(f"cannot make a run folder in {root}: {error.strerror}; choose another with --out") from error
    return path


def slug(label: str) -> str:
    """Return ``label`` as a part of a file name: small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "row"
