"""The specification and the results of a run: :class:`RunSpec`, :class:`RoundRecord`, :class:`RunResult`.

A spec is flat and scalar on purpose: it has to pass through a command line, Flower's run configuration and a
message to a client without losing anything. A result is stored as JSON beside one ``.npz`` of plain arrays;
nothing is pickled.
"""

from __future__ import annotations

import io
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, StateError, nearest
from fedcomp.experiments.findings import finite
from fedcomp.files import write
from fedcomp.strategies.parts import Scalar

if TYPE_CHECKING:
    from fedcomp.flower.ledger import TrafficLedger

SETTINGS_KEY: Final = "settings"
"""The run-configuration key that carries all settings as text. Flower refuses overrides of keys that are not in
``pyproject.toml``, so settings, whose names depend on the system, cannot be keys of their own."""

RESULT_FILE: Final = "result.json"
ROUNDS_FILE: Final = "rounds.jsonl"
ARRAYS_FILE: Final = "arrays.npz"
PRIVACY_FILE: Final = "privacy.jsonl"


def parse_value(text: str) -> Scalar:
    """Return what ``text`` writes: ``true``/``false``, an integer, a number, a JSON string, else text."""
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    if word.startswith('"'):
        try:
            value = json.loads(word)
        except json.JSONDecodeError as error:
            raise ConfigError(f"value {text!r} opens a quoted string but does not close it") from error
        return str(value)
    # int first: as floats, whole numbers beyond 2**53 would lose digits.
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return text


def format_value(value: Scalar) -> str:
    """Return the text from which :func:`parse_value` makes exactly ``value`` again."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        plain = value == value.strip() and not value.startswith('"') and isinstance(parse_value(value), str)
        return value if plain else json.dumps(value)
    return repr(value)


def parse_settings(text: str) -> dict[str, Scalar]:
    """Read ``"key=value key=value"``; a value with spaces is quoted as in a shell.

    Raises
    ------
    ConfigError
        When a word has no ``=`` or no key, or a quotation has no end.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"settings {text!r} cannot be split into key=value words: {error}") from error
    settings = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"setting {word!r} is not of the form key=value, for instance codec.density=0.01")
        settings[key.strip()] = parse_value(value)
    return settings


def format_settings(settings: Mapping[str, Scalar]) -> str:
    """Return the text from which :func:`parse_settings` makes ``settings`` again, keys in order of name."""
    return shlex.join(f"{key}={format_value(settings[key])}" for key in sorted(settings))


@dataclass(frozen=True)
class RunSpec:
    """One run: one system on one task on one engine.

    Attributes
    ----------
    system : str
        A name of the table in :mod:`fedcomp.experiments.systems`.
    label : str
        What the run is called in tables and plots; the system's name when empty.
    task : str
        A name known to :func:`fedcomp.tasks.get_task`.
    engine : str
        A name of :data:`fedcomp.experiments.engines.ENGINES`.
    rounds : int
        At least 0; with 0 rounds the initial model is evaluated and nothing is sent.
    clients : int
        At least 1.
    seed : int
        Names every random decision of the run, 0 to 2**63 - 1.
    settings : mapping of str to bool, int, float or str
        Everything else; the known keys are listed by :meth:`fedcomp.strategies.system.System.known_settings`.

    Raises
    ------
    ConfigError
        When a field has another type or range. Names are checked where the tables are, not here.

    Examples
    --------
    >>> spec = RunSpec(system="topk", rounds=5, settings={"codec.density": 0.05, "feedback": True})
    >>> spec.to_run_config()["settings"]
    'codec.density=0.05 feedback=true'
    """

    system: str = "fedavg"
    label: str = ""
    task: str = "digits"
    engine: str = "inprocess"
    rounds: int = 3
    clients: int = 10
    seed: int = 0
    settings: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        examples = {"system": "topk", "label": "top-k", "task": "digits", "engine": "inprocess"}
        for name, example in examples.items():
            value = getattr(self, name)
            if not isinstance(value, str) or (not value and name != "label"):
                raise ConfigError(f"{name} is {value!r}; expected a name, for instance {example!r}")
        for name, least in (("rounds", 0), ("clients", 1), ("seed", 0)):
            value = getattr(self, name)
            # True and False are ints to isinstance.
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} is {value!r}; expected a whole number of at least {least}")
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be below 2**63 to travel in a message")
        for key, value in self.settings.items():
            if not isinstance(key, str) or not key or key != key.strip():
                raise ConfigError(f"setting name {key!r} is not a word; write, say, codec.density=0.01")
            if not isinstance(value, bool | int | float | str):
                raise ConfigError(
                    f"setting {key!r} is {value!r}, a {type(value).__name__}; expected true/false, a number or text"
                )
        object.__setattr__(self, "settings", MappingProxyType(dict(sorted(self.settings.items()))))

    @property
    def name(self) -> str:
        """The label, or the system's name when no label was given."""
        return self.label or self.system

    def to_run_config(self) -> dict[str, Scalar]:
        """Return the flat dictionary that Flower's run configuration carries (all settings as one text)."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != SETTINGS_KEY}
        return {**plain, SETTINGS_KEY: format_settings(self.settings)}

    @classmethod
    def from_run_config(cls, config: Mapping[str, Scalar]) -> RunSpec:
        """Read :meth:`to_run_config`'s dictionary; missing keys take their defaults.

        Raises
        ------
        ConfigError
            For unknown keys and malformed values.
        """
        known = [f.name for f in fields(cls)]
        for key in config:
            if key not in known:
                raise ConfigError(
                    f"unknown run-configuration key {key!r}{nearest(key, known)}; options of system and task "
                    f"belong in {SETTINGS_KEY!r}, for instance settings='codec.density=0.01'"
                )
        values: dict[str, Any] = {key: value for key, value in config.items() if key != SETTINGS_KEY}
        text = config.get(SETTINGS_KEY, "")
        if not isinstance(text, str):
            raise ConfigError(f"{SETTINGS_KEY} is {text!r}; expected text such as 'codec.density=0.01'")
        return cls(**values, settings=parse_settings(text))

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy does not copy; the flat form does.
        return (RunSpec.from_run_config, (self.to_run_config(),))


@dataclass(frozen=True)
class RoundRecord:
    """What one round cost and reached. Round 0 is the evaluation of the initial model.

    Attributes
    ----------
    round : int
    accuracy, loss : float
        Of the global model on the task's test split after the round; NaN when it was not evaluated.
    uplink_payload_bytes, uplink_wire_bytes, downlink_payload_bytes, downlink_wire_bytes : int
        Bytes of this round alone between nodes and server, all nodes and message types together; payload is what the
        codec produced (or the plain tensors), wire is the whole serialised message.
    simulated_seconds : float
        Duration of the round on the simulated links, 0 where links are not simulated.
    wall_seconds : float
        Duration of the round on this machine, its evaluation included.
    replies, failures : int
        Replies to training messages with content, and messages that got an error or nothing.
    metrics : dict
        Aggregated client metrics and whatever the strategy reports.
    peer_payload_bytes, peer_wire_bytes : int
        Bytes of this round that clients handed to each other without the server, counted once, at the sender. They are
        part of no other column.
    """

    round: int
    accuracy: float
    loss: float
    uplink_payload_bytes: int = 0
    uplink_wire_bytes: int = 0
    downlink_payload_bytes: int = 0
    downlink_wire_bytes: int = 0
    simulated_seconds: float = 0.0
    wall_seconds: float = 0.0
    replies: int = 0
    failures: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    peer_payload_bytes: int = 0
    peer_wire_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dictionary; NaN becomes ``null``, which JSON has."""
        return {key: finite(value) for key, value in asdict(self).items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RoundRecord:
        """Read :meth:`to_json`'s dictionary."""
        values = dict(document)
        for key in ("accuracy", "loss"):
            if values.get(key) is None:
                values[key] = math.nan
        metrics = values.get("metrics") or {}
        values["metrics"] = {name: math.nan if value is None else value for name, value in metrics.items()}
        return cls(**values)


def _total(column: str, meaning: str) -> property:
    """Return the property that is a column's sum over the whole run, an int."""
    return property(lambda result: sum(getattr(record, column) for record in result.rounds), doc=meaning)


@dataclass
class RunResult:
    """A finished run.

    Attributes
    ----------
    spec : RunSpec
    rounds : list of RoundRecord
        In order, round 0 (the initial model) first.
    arrays : dict of str to ndarray
        The final global model.
    ledger : TrafficLedger
        Every message's bytes.
    seconds, simulated_seconds : float
        Duration on this machine and on the simulated links.
    notes : dict
        JSON-able facts about the run: versions, what the engine observed.
    """

    spec: RunSpec
    rounds: list[RoundRecord]
    arrays: dict[str, NDArray[Any]]
    ledger: TrafficLedger
    seconds: float
    simulated_seconds: float
    notes: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RoundRecord]:
        return iter(self.rounds)

    @property
    def final(self) -> RoundRecord:
        """The last round."""
        return self.rounds[-1]

    @property
    def accuracy(self) -> float:
        """Accuracy after the last round that was evaluated; NaN when none was."""
        return next((r.accuracy for r in reversed(self.rounds) if not math.isnan(r.accuracy)), math.nan)

    uplink_payload_bytes = _total("uplink_payload_bytes", "From clients to server: codecs' frames, or plain tensors.")
    uplink_wire_bytes = _total("uplink_wire_bytes", "From clients to server: serialised messages.")
    downlink_payload_bytes = _total("downlink_payload_bytes", "From server to clients: frames, or plain tensors.")
    downlink_wire_bytes = _total("downlink_wire_bytes", "From server to clients: serialised messages.")
    peer_payload_bytes = _total("peer_payload_bytes", "Between clients, without the server: bodies.")
    peer_wire_bytes = _total("peer_wire_bytes", "Between clients, without the server: all of it.")

    def to_json(self) -> dict[str, Any]:
        """Return everything except the arrays as a JSON-able dictionary."""
        return {
            "spec": self.spec.to_run_config(),
            "rounds": [record.to_json() for record in self.rounds],
            "ledger": self.ledger.to_json(),
            "seconds": self.seconds,
            "simulated_seconds": self.simulated_seconds,
            "notes": finite(self.notes),
        }

    def save(self, directory: str | Path) -> Path:
        """Write ``result.json`` and ``arrays.npz`` into ``directory``; return it. Both are on disk then.

        The JSON file appears last and at once, so that whoever waits for it never reads half a result.
        """
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        save_arrays(folder / ARRAYS_FILE, self.arrays)
        write(folder / RESULT_FILE, json.dumps(self.to_json(), allow_nan=False).encode(), mode=0o666)
        return folder

    @classmethod
    def load(cls, directory: str | Path) -> RunResult:
        """Read what :meth:`save` wrote.

        Raises
        ------
        StateError
            When ``directory`` holds no complete result.
        """
        from fedcomp.flower.ledger import TrafficLedger  # brings Flower, which a spec alone does not need

        folder = Path(directory)
        path = folder / RESULT_FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            return cls(
                spec=RunSpec.from_run_config(document["spec"]),
                rounds=[RoundRecord.from_json(record) for record in document["rounds"]],
                arrays=load_arrays(folder / ARRAYS_FILE),
                ledger=TrafficLedger.from_json(document["ledger"]),
                seconds=document["seconds"],
                simulated_seconds=document["simulated_seconds"],
                notes=document["notes"],
            )
        # All that damaged files make json, zipfile and numpy raise, and documents that hold something else.
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise StateError(f"no complete result in {folder}: {error}; was the run interrupted?") from error


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Store named arrays in one ``.npz``; names are kept beside the arrays, so that any name is allowed.

    Raises
    ------
    StateError
        For arrays of Python objects, which only a pickle could hold.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise StateError(f"array {name!r} holds Python objects; only plain numbers are stored")
    names = json.dumps(list(arrays)).encode()
    # np.savez takes keywords: a tensor called 'file' would clash with its own parameter.
    members = {f"array{i}": array for i, array in enumerate(arrays.values())}
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, names=np.frombuffer(names, np.uint8), **members)
    write(path, file.getbuffer(), mode=0o666)


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """Read what :func:`save_arrays` wrote."""
    with np.load(path, allow_pickle=False) as archive:
        names = json.loads(archive["names"].tobytes())
        return {name: archive[f"array{i}"] for i, name in enumerate(names)}
