"""Sizes of gigabytes: memory of a round, of adapters on a large base model, and states that no message can carry.

- A round of the drop-in pair and of plain FedAvg at 100 million values (:mod:`fedcomp.experiments.bench.round`).
- A client of ``fc.Adapters`` on a base model of 1.3 billion values in bfloat16, its digest included.
- A node whose state is larger than a message (2 GiB): its state folder, and the server's checkpoint of such a model.

Counted is what Python and numpy allocate at the peak, and for the digest, which reads torch's tensors, what the process
holds more than before at its peak (Linux alone).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg

from fedcomp.adapters import PEFT
from fedcomp.clients.compressed import compression
from fedcomp.clients.edge.node_config import STATE_FOLDER
from fedcomp.clients.kept import keep
from fedcomp.errors import why_missing
from fedcomp.experiments.bench.readpass import BenchError
from fedcomp.experiments.bench.round import DOWN, FEW, PAIR, SYSTEMS, rounds
from fedcomp.experiments.bench.server import Nodes
from fedcomp.flower import checkpoint
from fedcomp.flower._private import acting_as, content_to_bytes, set_message_id
from fedcomp.flower.logs import quiet
from fedcomp.flower.records import Place, base_digest, to_arrays, to_record
from fedcomp.flower.state import MOST_BYTES
from fedcomp.measuring import Bound, Case, Row, Traced, traced
from fedcomp.strategies.adapters import Adapters

WIDTH, LAYERS, TOKENS, RANK = 2048, 24, 50_257, 16
"""Of the base model: a GPT of 1.31 billion values; adapters on two projections of each layer."""

STATE: Final = 2_300_000_000
"""Bytes of a state that no message carries."""

VALUES: Final = 100_000_000
_STATUS: Final = Path("/proc/self/status")


def cases(quick: bool) -> Iterator[Case]:
    """Yield the rounds, the adapters, the states."""
    size = 20_000 if quick else VALUES
    for name in SYSTEMS:
        yield Case(f"{name}, {size:,} values, {FEW} replies", partial(rounds, name, size, FEW, 3))

    def most(system: str, side: str, bound: str, source: str, *, gate: bool) -> Bound:
        name = f"{system}, {size / 1e6:g} million values: {side}'s peak in models"
        return Bound(name, (f"{side}, models", {"system": system, "values": size}), bound, source, gate)

    written = "a client's new memory and its new replica, which become its state (derived)"
    yield Case(
        bounds=[
            most(PAIR, "client", "<= 2.0", "goal of this project", gate=True),
            most(PAIR, "server", "<= 2.0", "goal of this project: the sum and the new model", gate=True),
            most(DOWN, "client", "<= 2.0", f"goal of this project; {written}", gate=False),
            most(DOWN, "server", "<= 2.0", "goal of this project", gate=False),
        ]
    )
    missing = why_missing("torch")
    if not missing:
        shape = (64, 2, 100) if quick else (WIDTH, LAYERS, TOKENS)
        yield Case(f"adapters on a model of width {shape[0]}", partial(_adapters, *shape))
    yield Case(
        bounds=[
            Bound(
                "a base model's digest: memory beside the model, in tables of its tokens",
                ("peak in tables", {"what": "digest"}),
                "<= 0.5",
                "nothing is copied, and float32 would be 2 tables (derived)",
                skipped=missing,
            ),
            Bound(
                "a client's round: memory in adapters, the app's own included",
                ("peak in adapters", {"what": "client"}),
                "<= 4",
                "chosen: no part of it grows with the base model",
                skipped=missing,
            ),
        ]
    )
    with tempfile.TemporaryDirectory() as home:
        yield Case("states", partial(_states, Path(home), 400_000 if quick else STATE))
    yield Case(
        bounds=[
            Bound("bytes of the state that Flower gets", ("bytes left", {"what": "save"}), f"<= {MOST_BYTES}", "2 GiB"),
            Bound("values that came back changed", ("differ", {"what": "load"}), "== 0", "exact"),
            Bound("to save: memory in states", ("peak in states", {"what": "save"}), "<= 0.1", "no copy (derived)"),
            Bound(
                "to load: memory in states",
                ("peak in states", {"what": "load"}),
                "<= 2.1",
                "the state, and one array on its way (derived)",
            ),
        ]
    )


def resident(call: Callable[[], Any]) -> Traced:
    """Call, and return by how many bytes the process grew at its peak.

    Raises
    ------
    BenchError
        Where the system does not say.
    """

    def now(name: str) -> int:
        return next(1024 * int(line.split()[1]) for line in _STATUS.read_text().splitlines() if line.startswith(name))

    try:
        # Lets the peak begin anew.
        Path("/proc/self/clear_refs").write_text("5")
        before = now("VmRSS")
        result = call()
        return Traced(result, now("VmHWM") - before, now("VmRSS") - before)
    except OSError as error:
        raise BenchError(f"the peak of this process is not known here: {error.strerror}") from error


def base_model(width: int, layers: int, tokens: int) -> Any:
    """Return a model's tensors in bfloat16, as an object with a ``state_dict``."""
    import torch

    shapes = {"tokens.weight": (tokens, width)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{part}.weight": (width, width) for part in ("q", "k", "v", "out")}
        shapes |= {f"layers.{layer}.up.weight": (4 * width, width), f"layers.{layer}.down.weight": (width, 4 * width)}
    model = torch.nn.Module()
    tensors = {
        name: torch.full(shape, 1.0 + number, dtype=torch.bfloat16)
        for number, (name, shape) in enumerate(shapes.items())
    }
    model.state_dict = lambda: tensors  # type: ignore[method-assign,assignment]
    return model


def _adapters(width: int, layers: int, tokens: int, _: Any) -> list[Row]:
    """Return the cost of the digest, and of a client's round in which the base model is held and never sent."""
    base = base_model(width, layers, tokens)
    held = sum(tensor.numel() for tensor in base.state_dict().values())
    began = time.perf_counter()
    digest = resident(partial(base_digest, base))
    seconds, rng = time.perf_counter() - began, np.random.default_rng(1)
    halves = {}
    for number in range(layers):
        for part in ("q", "v"):
            first, second = (f"base_model.model.layers.{number}.{part}.{half}.weight" for half in PEFT[0])
            halves[first] = rng.standard_normal((RANK, width), np.float32)
            halves[second] = np.zeros((width, RANK), np.float32)
    adapters = sum(array.nbytes for array in halves.values())
    server: Any = Adapters(FedAvg(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1), base=digest.result)
    node = Context(1, 1, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
    mod = compression(base=lambda: digest.result)

    def app(msg: Message, context: Context) -> Message:
        own = to_arrays(next(iter(msg.content.array_records.values())))
        for name, array in own.items():
            if PEFT[0][1] in name:
                array += rng.standard_normal(array.shape, np.float32)
        content = RecordDict({"arrays": to_record(own), "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=msg)

    peak = 0
    arrays = server.travelling(to_record(halves))
    with quiet(), acting_as(1, 0):
        for number in (1, 2, 3):
            (message,) = server.configure_train(number, arrays, ConfigRecord(), Nodes(1))
            set_message_id(message, f"{number:064x}")
            answered = traced(partial(mod, message, node, app))
            peak = answered.peak
            arrays, _ = server.aggregate_train(number, [answered.result])
            if arrays is None:
                raise BenchError(f"the adapters of round {number} were not used")
    common = {"base, values": held, "base, MB": round(2 * held / 1e6, 1)}
    return [
        {
            "what": "digest",
            **common,
            "seconds": round(seconds, 2),
            "peak, MB": round(digest.peak / 1e6, 1),
            "peak in tables": round(digest.peak / (2 * width * tokens), 3),
        },
        {
            "what": "client",
            **common,
            "adapters, MB": round(adapters / 1e6, 1),
            "peak, MB": round(peak / 1e6, 1),
            "peak in adapters": round(peak / adapters, 2),
            "kB up": round(len(content_to_bytes(answered.result.content)) / 1e3, 1),
        },
    ]


def _states(home: Path, size: int, _: Any) -> list[Row]:
    """Let a node write a state of ``size`` bytes and read it again; the same for a checkpoint."""
    context = Context(1, 1, {"partition-id": 0, STATE_FOLDER: str(home / "state")}, RecordDict(), {})
    place = Place((size // 4,), np.float32)
    values = place.values
    values[:] = np.arange(values.size, dtype=np.uint32).view(np.float32)
    big = to_record({"memory": values}, [place])
    rows: list[Row] = []

    def message() -> Message:
        out = Message(RecordDict({"x": ConfigRecord({"a": 1})}), 1, "train")
        set_message_id(out, f"{len(rows):064x}")
        return out

    def write(msg: Message, own: Context) -> Message:
        own.state["memory"] = big
        return Message(RecordDict(), reply_to=msg)

    def look(msg: Message, own: Context) -> Message:
        read = to_arrays(own.state.array_records["memory"], copy=False)["memory"]
        differ = int(np.count_nonzero(read.view(np.uint32) != values.view(np.uint32)))
        return Message(RecordDict({"m": MetricRecord({"differ": differ})}), reply_to=msg)

    def row(what: str, call: Callable[[], Any], **more: Callable[[Any], Any]) -> None:
        began = time.perf_counter()
        done = traced(call)
        figures = {"seconds": round(time.perf_counter() - began, 1), "peak in states": round(done.peak / size, 2)}
        rows.append({"what": what, "MB": size / 1e6, **figures, **{name: of(done.result) for name, of in more.items()}})

    with quiet(), acting_as(1, 0):
        left = {"bytes left": lambda _: len(content_to_bytes(context.state))}
        row("save", lambda: keep(message(), context, write), **left)
        row("load", lambda: keep(message(), context, look), differ=lambda reply: reply.content["m"]["differ"])
        path = home / "checkpoint"
        row("save a checkpoint", lambda: checkpoint.save(path, server_round=1, arrays=big))
        os.unlink(next((home / "state").glob("*.state")))
        row("load the checkpoint", lambda: checkpoint.load(path).arrays, differ=lambda found: _differ(found, big))
    return rows


def _differ(a: ArrayRecord, b: ArrayRecord) -> int:
    return sum(a[name].data != b[name].data for name in b)
