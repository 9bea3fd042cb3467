"""Advice for a model and a link: the lines of ``docs/choose/use-this-when.md`` that fit, and the bytes that each sends.

Bytes are not computed from formulas. A few rounds are run in this process, with the model's layout, random updates,
and the strategy and codec of the line; the traffic ledger counts what they send. ``fedcomp advise`` prints the table.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedcomp.errors import ConfigError, optional
from fedcomp.experiments.advised_app import first_model
from fedcomp.experiments.advised_lines import LINES, Line, Situation, amounts, measured_loss
from fedcomp.experiments.report import bit_rate, short_bytes
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, OneOf, Real, checked
from fedcomp.timing import Link, parse_link

Arrays = dict[str, NDArray[Any]]

DIRECT: Final = 250_000
"""Values of a model that is tried as it is. A larger one is tried at two smaller sizes: bytes are linear in them."""
LARGEST: Final = 10**12
SMALL: Final = 4096
"""Values of a tensor that is not shrunk."""
NODES: Final = 15
"""The most nodes of a trial."""
SEND_AT_LEAST: Final = 0.9
"""Compression that leaves more than this part of the link time is not recommended."""
DIFFERENT: Final = 1.1
"""Link times that differ by less are equal; the line that was measured to lose less is then first."""
ADDED: Final = ("bytes", "client", "record")
"""Purposes of lines whose server adds replies into one buffer, so that one more needs no more than its own bytes."""


@dataclass(frozen=True)
class Candidate:
    """One candidate line and its predicted cost.

    Attributes
    ----------
    name, code : str
        The line's name on the page, and what to paste.
    up, down : float
        Bytes of all messages that a client sends and receives in a round in which it takes part, on average over the
        run; those between clients are in both.
    up_run, down_run : float
        Bytes of all clients in all rounds.
    seconds : float
        Link time of a round, on average over the run. Training and encoding come on top.
    client_memory : float
        Bytes of a client at the peak of a round: its state, the message, the trained model, and what encoding needs.
        Training itself is left out.
    server_memory : float
        Bytes of the server at the peak of a round, with its models and the replies of all participants.
    kept : float
        Bytes that a client keeps between rounds.
    lost : float or None
        Points of accuracy that the line was measured to lose against FedAvg, the worst of three tasks; None where
        nothing was measured.
    fits : str
        Empty, or why the line does not fit.
    note : str
        The line's precondition.
    """

    name: str
    code: str
    up: float
    down: float
    up_run: float
    down_run: float
    seconds: float
    client_memory: float
    server_memory: float
    kept: float
    lost: float | None
    fits: str
    note: str


@dataclass(frozen=True)
class Advice:
    """The result of :func:`advise`; its ``str()`` is the table that ``fedcomp advise`` prints.

    Attributes
    ----------
    candidates : tuple of Candidate
        The recommendation first, then the other lines that fit, then those that do not.
    reason : str
        Why the first one is recommended, in one sentence.
    notes : tuple of str
        What the figures leave out.
    parameters : int
        Values of the model.
    """

    candidates: tuple[Candidate, ...]
    reason: str
    notes: tuple[str, ...]
    parameters: int

    def __str__(self) -> str:
        head = ("", "up", "down", "up, run", "down, run", "s a round", "client", "server", "keeps", "points lost")
        lines: list[tuple[str, ...]] = [head]
        for at in self.candidates:
            amounts = (at.up, at.down, at.up_run, at.down_run)
            memory = (at.client_memory, at.server_memory, at.kept)
            lost = "not measured" if at.lost is None else f"{at.lost:.1f}"
            cells = (*map(short_bytes, amounts), f"{at.seconds:.3g}", *map(short_bytes, memory), lost)
            lines.append((at.name, *cells))
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = [
            "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        first = self.candidates[0]
        text = [self.reason, "", f"  {first.code}", *([f"  {first.note}"] if first.note else []), "", *table, ""]
        text += [f"{at.name} does not fit: {at.fits}" for at in self.candidates if at.fits]
        return "\n".join([*text, *self.notes])


def advise(
    model: str | Path | Mapping[str, Any] | None = None,
    *,
    parameters: int | None = None,
    clients: int = 10,
    fraction: float = 1.0,
    rounds: int = 30,
    link: str | Link = "10mbit",
    may_lose: float = 1.0,
    privacy: str = "none",
    vanish: bool = False,
    server: bool = True,
    median: bool = False,
) -> Advice:
    """Return which line to paste for a model and a link, with the bytes and seconds of every candidate.

    Parameters
    ----------
    model : str, Path or mapping of str to array, optional
        A state dict: a ``.pt`` or ``.pth``, ``.npz`` or ``.safetensors`` file, or its arrays by name. No code in a file
        is executed. Or the folder of a Flower app: its ServerApp is run, as ``flwr run`` does, up to the first message
        that holds a model.
    parameters : int, optional
        Number of the model's values, in place of ``model``: one matrix stands for it.
    clients : int
        Number of clients in all.
    fraction : float
        Share of the clients that take part in a round.
    rounds : int
        Number of rounds.
    link : str or Link
        A client's link: a preset such as ``"lte"``, or ``UP[/DOWN][@LATENCY]`` as ``"1mbit/8mbit@50ms"``.
    may_lose : float
        Points of accuracy that compression may cost.
    privacy : {"none", "hide", "client", "record"}
        Whether the server may see only the sum of the updates, or which unit a privacy guarantee covers.
    vanish : bool
        Whether clients leave for good in the middle of a round.
    server : bool
        Whether a server may hold the model. Without one the clients train by gossip.
    median : bool
        Whether the server looks at single updates, as FedMedian and Krum do.

    Returns
    -------
    Advice
        Candidates, the recommendation first. ``print()`` shows them as a table.

    Raises
    ------
    ConfigError
        For a file that is not a state dict of numbers, an app that sends no model, a value out of range, or
        requirements that no line meets together.
    MissingExtra
        When a ``.pt`` file is given and torch is not installed.

    Examples
    --------
    >>> advice = advise(parameters=5_000, rounds=5, link="1mbit")
    >>> advice.candidates[0].name
    'A'
    """
    if (model is None) == (parameters is None):
        raise ConfigError("advise() needs a model or a number of parameters: give one of the two")
    at = Situation(
        clients=checked("clients", clients, Int(2, 10**9)),
        fraction=checked("fraction", fraction, Real(above=0.0, most=1.0)),
        rounds=checked("rounds", rounds, Int(1, 10**6)),
        may_lose=checked("may_lose", may_lose, Real(least=0.0, most=100.0)),
        privacy=checked("privacy", privacy, OneOf("none", "hide", "client", "record")),
        vanish=bool(checked("vanish", vanish, Flag())),
        server=bool(checked("server", server, Flag())),
        median=bool(checked("median", median, Flag())),
    )
    where = parse_link(link) if isinstance(link, str) else link
    if reason := at.contradiction():
        raise ConfigError(reason)
    app = isinstance(model, str | Path) and Path(model).is_dir()
    widened = 0
    if model is None:
        arrays = _flat(parameters)
    elif isinstance(model, str | Path):
        arrays, widened = (_checked(first_model(Path(model), at.clients)), 0) if app else load(Path(model))
    else:
        arrays = _checked(model)
    at = replace(at, flat=all(a.ndim < 2 for a in arrays.values()))
    size = int(parameters or sum(a.size for a in arrays.values()))
    found = [_candidate(line, at, arrays, size, where) for line in LINES if line.concerns(at)]
    advice = _ranked(found, size, at, where)
    notes = list(advice.notes)
    if app:
        notes.append(f"The model of {size:,} values is the first that the app sent; its ServerApp was run up to there.")
    if widened:
        notes.append(
            f"{widened} tensors of bfloat16 are counted as float32, in which all lines send models; plain FedAvg over "
            "fc.record sends half of that."
        )
    return replace(advice, notes=tuple(notes))


def _ranked(found: Sequence[Candidate], size: int, at: Situation, link: Link) -> Advice:
    plain = next(each for each in found if each.name == "FedAvg")

    def order(each: Candidate) -> tuple[Any, ...]:
        # Link times within a tenth of each other are one step of the scale. Lines of which nothing was measured stay in
        # the order of the page.
        step = round(math.log(max(each.seconds, 1e-9)) / math.log(DIFFERENT))
        return bool(each.fits), step, *((math.inf, 0.0) if each.lost is None else (each.lost, each.up_run))

    ranked = sorted(found, key=order)
    first = ranked[0]
    if not plain.fits and first is not plain and first.seconds > SEND_AT_LEAST * plain.seconds:
        ranked = [plain, *(each for each in ranked if each is not plain)]
        first = plain
    if first is plain:
        reason = "Take plain FedAvg: no line that fits saves a tenth of its link time."
    elif plain.fits:
        reason = f"Take {first.name}: it is the line for what you ask, and needs {first.seconds:.3g} s a round."
    else:
        lost = "" if first.lost is None else f", and was measured to lose {first.lost:.1f} points at most"
        reason = (
            f"Take {first.name}: it has the shortest link time of the lines that fit, {first.seconds:.3g} s a round "
            f"instead of {plain.seconds:.3g}{lost}."
        )
    notes = [
        "up, down: bytes of a client in a round in which it takes part; messages between clients are in both.",
        f"up, run and down, run: of all {at.rounds} rounds, with {at.participants} of {at.clients} clients in each.",
        f"s a round: link time alone, at {bit_rate(link.up_bits_per_s)} up, {bit_rate(link.down_bits_per_s)} down and "
        f"{1000 * link.latency_s:g} ms a message; training and encoding come on top.",
        "client, server: memory at the peak of a round, without training; the server's with the replies it holds.",
        "keeps: what is stored of a client between rounds.",
        "points lost: worst of three tasks, `python -m experiments.run readme`; your model may lose more.",
    ]
    if size > DIRECT:
        notes.append(
            f"The model has more than {DIRECT} values: bytes were extrapolated from two smaller ones, and memory in "
            "proportion from the larger one, which is an upper estimate."
        )
    if any(line.name == each.name and line.remembers and not each.fits for each in found for line in LINES):
        notes.append(
            "C, D, E and I keep error feedback: a longer server step is worth a try, for Auto 2 at .5 bit, 3 at .1, "
            "4 at .02."
        )
    return Advice(tuple(ranked), reason, tuple(notes), size)


def _candidate(line: Line, at: Situation, arrays: Arrays, size: int, link: Link) -> Candidate:
    if size <= DIRECT:
        figures = _trial(line, at, arrays, link)
    else:
        small, large = (_shrunk(arrays, goal) for goal in (DIRECT // 2, DIRECT))
        n, m = (sum(a.size for a in each.values()) for each in (small, large))
        low, high = (_trial(line, at, each, link) for each in (small, large))
        # Of a model that cannot shrink (thousands of small tensors) both are the same.
        figures = high + (high - low) * (size - m) / (m - n) if m > n else high * size / m
        # Below some size buffers of a fixed length need more memory than models, so that two sizes lie on no line.
        figures[4:] = high[4:] * size / m
    up, down, seconds, kept, client, server = (float(value) for value in figures)
    many = at.rounds * at.participants
    return Candidate(
        line.name,
        line.code(at),
        up,
        down,
        up * many,
        down * many,
        seconds,
        client,
        server,
        kept,
        measured_loss(line, at),
        line.unfit(at),
        line.note,
    )


def _trial(line: Line, at: Situation, arrays: Arrays, link: Link) -> NDArray[np.float64]:
    """Return bytes up and down of a participant in a round and the link seconds of a round, on average over a run, the
    bytes of a client's state, and those of a client and of the server at the peak of a round."""
    from flwr.app import Array, ArrayRecord
    from flwr.serverapp.strategy import FedAvg, FedMedian

    from fedcomp.experiments.advised_memory import CountingGrid
    from fedcomp.flower.metered import MeteredGrid
    from fedcomp.flower.rounds import fit

    # Clients of the pair do not see each other; of the others the bytes depend on how many there are.
    shown = min(at.participants, 2 if line.purpose in ("bytes", "record") else NODES)
    nodes = max(shown, min(at.clients, NODES, math.ceil(shown / at.fraction)))
    # The first rounds differ: models go whole, memories are empty. The later half stands for the rest of the run.
    rounds = max(4, math.ceil(3 * nodes / shown) if shown < nodes else 0)

    class Cohort(CountingGrid):
        def get_node_ids(self) -> list[int]:
            words = Key(0, "advise/cohort", round=self.round or 0).u64_of(range(nodes))
            drawn = set(sorted(words, key=words.__getitem__)[:shown])
            return [node for node in super().get_node_ids() if self.partition_of(node) in drawn]

    def ended(number: int, *_: object) -> None:
        inner.served()
        # Of two rounds: the first renews what lasts, so that the second sees it.
        if number == rounds - 2:
            inner.start()

    mean = FedMedian if line.purpose == "median" else FedAvg
    with _silent(), Cohort(nodes) as inner:
        grid = MeteredGrid(inner)
        strategy = line.make(mean(fraction_evaluate=0.0), amounts(at.scaled(nodes, shown)))
        initial = ArrayRecord({name: Array(np.ascontiguousarray(array)) for name, array in arrays.items()})
        fit(strategy, grid, initial, rounds, on_round=ended)
        kept = sum(len(inner.node(partition).stored()) for partition in range(nodes)) / nodes
    ledger = grid.ledger
    each = np.zeros((rounds, 3))
    for i in range(rounds):
        up, down = (ledger.by("message_type", round=i + 1, direction=d, link="hub") for d in ("up", "down"))
        # A message between clients is the sender's row alone, and crosses two links.
        peer = ledger.total(round=i + 1, link="peer") / shown
        each[i, :2] = sum(up.values()) / shown + peer, sum(down.values()) / shown + peer
        # As timing.simulated_seconds(), of a participant with the mean of the bytes.
        crossings = ledger.total("messages", round=i + 1, link="hub") / shown
        crossings += 2 if peer else 0
        each[i, 2] = (
            8.0 * each[i, 0] / link.up_bits_per_s + 8.0 * each[i, 1] / link.down_bits_per_s + link.latency_s * crossings
        )
    # Not the last one, which can be unlike the others: gossip shows models once more.
    steady = each[rounds // 2 : -1].mean(axis=0)
    run = each[: at.rounds]
    averages = (run.sum(axis=0) + (at.rounds - len(run)) * steady) / at.rounds
    more, reply = at.participants - shown, each[-1, 0]
    if more and line.purpose not in ADDED:
        half = shown // 2
        fewer = _trial(line, replace(at, clients=half, fraction=1.0), arrays, link)[-1]
        reply = max(reply, (inner.server - fewer) / (shown - half))
    return np.append(averages, (kept, inner.client, inner.server + more * reply))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep warnings about the trial's rounds off the screen: they are not the user's."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def load(path: Path) -> tuple[Arrays, int]:
    """Return the arrays of a state dict in a file, by name, and how many of them were bfloat16, which numpy does not
    have: these are float32. No code in the file is executed.

    Raises
    ------
    ConfigError
        When the file cannot be read, is none of the three kinds, or holds anything but arrays of numbers.
    MissingExtra
        When it needs torch, and torch is not installed.
    """
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}")
    kind = path.suffix.lower()
    try:
        if kind in (".pt", ".pth"):
            found, widened = _torch_file(path)
            return _checked(found), widened
        if kind == ".npz":
            with np.load(path, allow_pickle=False) as file:
                return _checked({name: file[name] for name in file.files}), 0
        if kind == ".safetensors":
            found, widened = _safetensors(path)
            return _checked(found), widened
    except ConfigError:
        raise
    # All that a damaged file makes torch, zipfile, json and numpy raise.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError, BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read as a state dict: {type(error).__name__}: {error}") from error
    raise ConfigError(f"{path.name} is not a state dict that is read here: expected .pt, .pth, .npz or .safetensors")


def _torch_file(path: Path) -> tuple[Mapping[str, Any], int]:
    with optional("a .pt file"):
        import torch
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        raise ConfigError(
            f"{path} holds more than tensors, which is not loaded since it could be code; save model.state_dict()"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise ConfigError(f"{path} is not a state dict; save model.state_dict()")
    wide = {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in found.items()}
    return {n: t.detach().numpy() for n, t in wide.items()}, sum(wide[n] is not t for n, t in found.items())


_SAFE_DTYPES: Final = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8",
    "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"
}  # fmt: skip


def _safetensors(path: Path) -> tuple[Arrays, int]:
    """Read the file by its header: eight bytes of length, JSON with places of arrays, then the arrays."""
    data = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= min(data.size - 8, 100_000_000):
        raise ValueError("no header")
    body, found, widened = data[8 + length :], {}, 0
    for name, at in json.loads(data[8 : 8 + length].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = at["data_offsets"]
        if not 0 <= begin <= end <= body.size:
            raise ValueError(f"{name} is outside of the file")
        raw = body[begin:end].tobytes()
        if at["dtype"] == "BF16":
            values = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            widened += 1
        else:
            values = np.frombuffer(raw, _SAFE_DTYPES[at["dtype"]])
        found[name] = values.reshape(at["shape"])
    return found, widened


def _checked(model: Mapping[str, Any]) -> Arrays:
    arrays = {str(name): np.asarray(array) for name, array in model.items()}
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub":
            raise ConfigError(f"{name} is an array of {array.dtype}, and a model has numbers")
    if not any(array.size for array in arrays.values() if array.dtype.kind == "f"):
        raise ConfigError("the model has no floating-point values, so there is nothing to compress")
    return arrays


def _flat(parameters: Any) -> Arrays:
    # Of a larger model no more than this is tried.
    size = min(checked("parameters", parameters, Int(1, LARGEST)), DIRECT)
    # A matrix: gossip sends tensors of one dimension whole.
    return {"values": Key(0, "advise/model").generator().standard_normal((size, 1), np.float32)}


def _shrunk(arrays: Arrays, goal: int) -> Arrays:
    """Return the same tensors with fewer rows, of about ``goal`` values together; small ones stay as they are."""
    small = sum(array.size for array in arrays.values() if array.size <= SMALL)
    part = max(0.0, goal - small) / max(1, sum(array.size for array in arrays.values()) - small)

    def cut(array: NDArray[Any]) -> NDArray[Any]:
        if array.size <= SMALL or part >= 1.0:
            return array
        row = array.size // len(array)
        # A few long rows: columns go as well.
        flat = array.reshape(len(array), row)
        rows = min(len(array), max(1, math.ceil(SMALL / row), round(len(array) * part)))
        columns = min(row, max(SMALL // rows, round(array.size * part / rows)))
        return np.ascontiguousarray(flat[:rows, :columns])

    return {name: cut(array) for name, array in arrays.items()}
