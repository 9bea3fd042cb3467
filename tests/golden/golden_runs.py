"""Records of what every system does at toy size, made by the code as it is: what a change of structure must keep.

    PYTHONPATH=tests python tests/golden/golden_runs.py write [NAME ...]
    PYTHONPATH=tests python tests/golden/golden_runs.py check [NAME ...] [--against COMMIT]

Every path of updates (``round_paths``, whose arithmetic is the same on every machine) and every row of the systems'
table runs in process, 12 rounds, with three seeds, without faults and with eight kinds of them at once; every
experiment runs at its smallest size. A record holds, aspect by aspect, what came of it: the model after every round,
what left each side (number, bytes, digest), what clients remember, who was used and who was refused and why, what a
private run spent, and whether a run that is stopped after round 6 and resumed ends the same; of an experiment the
values of its claims, and the numbers of its tables and figures. ``check`` compares with the files beside this one. Rows
and experiments train with torch, whose last bits differ between processors: where digests differ on another machine,
``--against`` makes the records of a commit anew, here, in a copy of that commit, and compares with those.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.serverapp.strategy import Result
from private_rows import small as private
from round_paths import NODES, PATHS
from round_paths import Path as Route

from fedcomp.clients.app import app as honest
from fedcomp.experiments import engines
from fedcomp.experiments.catalog import CATALOG
from fedcomp.experiments.engines import inprocess
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower import checkpoint
from fedcomp.flower.faults import KINDS, FaultPlan, RandomFaults
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.logs import quiet
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.payload import frames, models
from fedcomp.flower.rounds import fit
from fedcomp.rng import Key

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
FILES: Final = {"path": HERE / "paths.json", "row": HERE / "rows.json", "page": HERE / "pages.json"}

SEEDS: Final = (1, 2, 3)
ROUNDS, STOP = 12, 6
FAULTY: Final = {kind: 0.05 for kind in KINDS if kind != "none"}

UNSTEADY: Final = "differs from run to run"
"""In place of what no two runs have alike: sealed bytes, times."""

Record = dict[str, Any]


class Watch:
    """A client app that notes what reaches and leaves it, and what it remembers after each message.

    By client: in which order a strategy asks them is drawn anew in each run.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.down: dict[int, Counted] = defaultdict(Counted)
        self.up: dict[int, Counted] = defaultdict(Counted)
        self.memories: dict[int, list[str]] = defaultdict(list)

    def __call__(self, message: Message, context: Context) -> Message:
        partition = int(context.node_config["partition-id"])
        self.down[partition].add(message.content)
        reply = self.app(message, context)
        if not reply.has_error():
            self.up[partition].add(reply.content)
        self.memories[partition].append(remembered(context.state))
        return reply

    def record(self) -> Record:
        """Return what passed, and what was remembered after each message and at the end."""
        last = {partition: held[-1] for partition, held in self.memories.items()}
        return {
            **together("down", self.down),
            **together("up", self.up),
            "memories": short(self.memories),
            "last memories": short(last),
        }


class Counted:
    """Frames and models that passed."""

    def __init__(self) -> None:
        self.frames = self.size = 0
        self.seen: list[str] = []

    def add(self, content: RecordDict) -> None:
        """Note all of a message."""
        passed = dict(frames(content))
        for name, record in models(content).items():
            passed |= {f"{name}/{key}": array.data for key, array in record.items()}
        for name, data in sorted(passed.items()):
            self.frames, self.size = self.frames + 1, self.size + len(data)
            self.seen.append(f"{name} {hashlib.sha256(data).hexdigest()[:16]}")


def together(way: str, counts: Mapping[int, Counted]) -> Record:
    """Return numbers, bytes and digest of what passed between the server and all clients."""
    number, size = (sum(getattr(c, which) for c in counts.values()) for which in ("frames", "size"))
    seen = {partition: counted.seen for partition, counted in counts.items()}
    return {f"{way} frames": number, f"{way} bytes": size, f"{way} digest": short(seen)}


def short(value: Any) -> str:
    """Return a digest of what JSON can write."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def remembered(state: RecordDict) -> str:
    """Return a digest of the arrays a client remembers; sessions and numbers of messages are drawn anew in each run."""
    held = hashlib.sha256()
    for name, record in sorted(state.items()):
        if isinstance(record, ArrayRecord):
            for key, array in record.items():
                held.update(f"{name}/{key}:{array.dtype}{array.shape}".encode() + array.data)
    return held.hexdigest()[:16]


def digest_of(arrays: ArrayRecord | Mapping[str, np.ndarray]) -> str:
    made = hashlib.sha256()
    for key, array in arrays.items():
        values = array.numpy() if isinstance(array, Array) else array
        made.update(f"{key}:{values.dtype}{values.shape}".encode() + np.ascontiguousarray(values).tobytes())
    return made.hexdigest()[:12]


def plain(text: str) -> str:
    """Return a reason without what differs from run to run, or says nothing: numbers of nodes, checksums."""
    return re.sub(r"\b(0x[0-9a-f]+|\d{9,})\b", "N", str(text))[:200]


def plan(seed: int) -> FaultPlan:
    return RandomFaults(Key(seed, "golden/faults"), FAULTY)


# --- paths of the drop-in pair and its relatives ---


def of_path(route: Route, seed: int, faulty: bool) -> Record:
    """Return the record of one run of a path."""
    watch = Watch(route.app())
    engine: dict[str, Any] = {"seed": seed, "fault": plan(seed) if faulty else None}
    made: list[str] = []
    ledger, strategy = TrafficLedger(), route.strategy()
    record: Record = {}
    with InProcessGrid(watch, NODES, **engine) as grid:
        meter = MeteredGrid(grid, ledger)
        with ended(record):
            fit(
                strategy, meter, _model(route), ROUNDS, timeout=9.0, on_round=lambda _, a, __: made.append(digest_of(a))
            )
    record["models"] = made
    record["ledger"] = ledger.summary()
    reports = getattr(strategy, "reports", {})
    record["reports"] = [_figures(reports[n].figures()) for n in sorted(reports)]
    record |= watch.record()
    again: Record = {}
    resumed = _resumed_path(route, engine, again)
    # A run that ends before its time ends so again; one that cannot be stopped says why.
    same = again.get("ended") == record.get("ended")
    record["resumed"] = resumed == made if same else again.get("ended", False)
    return record


def _resumed_path(route: Route, engine: Mapping[str, Any], record: Record) -> list[str]:
    """Return the models of a run that stops after round :data:`STOP` and goes on in new objects; note why it cannot."""
    made: list[str] = []

    def note(number: int, arrays: ArrayRecord, outcome: Any) -> None:
        made.append(digest_of(arrays))

    with tempfile.TemporaryDirectory() as folder, ended(record):
        path, result = Path(folder, "run.ckpt"), Result()
        with InProcessGrid(route.app(), NODES, **engine) as grid:
            strategy = route.strategy()

            def stop(number: int, arrays: ArrayRecord, outcome: Any) -> None:
                note(number, arrays, outcome)
                if number == STOP:
                    saved = {"server_round": STOP, "arrays": arrays, "strategy": strategy}
                    checkpoint.save(path, grid=grid, result=result, **saved)
                    raise KeyboardInterrupt

            with contextlib.suppress(KeyboardInterrupt):
                fit(strategy, grid, _model(route), ROUNDS, timeout=9.0, on_round=stop, result=result)
        if path.exists():
            with InProcessGrid(route.app(), NODES, **engine) as grid:
                strategy = route.strategy()
                saved = checkpoint.resume(path, strategy, grid)
                fit(
                    strategy,
                    grid,
                    saved.arrays,
                    ROUNDS,
                    start_round=STOP + 1,
                    timeout=9.0,
                    on_round=note,
                    result=saved.result,
                )
    return made


def _model(route: Route) -> ArrayRecord:
    arrays = ArrayRecord({"weight": Array(np.arange(1200, dtype=np.float32).reshape(40, 30) % 7 - 3)})
    arrays["bias"] = Array(np.zeros(12, np.float32))
    if route.buffers:
        arrays["steps"] = Array(np.array(0, np.int64))
    return arrays


def _figures(figures: Mapping[str, Any]) -> Record:
    """Return a report's figures, without times, in a form that JSON keeps."""
    return {name: _kept(value) for name, value in sorted(figures.items()) if "seconds" not in name}


def _kept(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {plain(k): _kept(v) for k, v in sorted(value.items(), key=lambda item: str(item[0]))}
    if isinstance(value, list | tuple):
        return [_kept(v) for v in value]
    return value if isinstance(value, int | bool | None) else plain(value)


@contextlib.contextmanager
def ended(record: Record) -> Iterator[None]:
    """Note why a run ended before its time: that, too, is what a system does."""
    try:
        yield
    except Exception as error:
        # Flower's own strategy, which is among the rows, reads replies as they come.
        record["ended"] = plain(f"{type(error).__name__}: {error}")


# --- rows of the systems' table ---


def spec_of(name: str, seed: int) -> RunSpec:
    """Return a small run of a row."""
    system, size = SYSTEMS[name], {"rounds": ROUNDS, "clients": 5, "seed": seed}
    if system.private:
        return replace(private(name), **size)
    if name == "skewed-gcn":
        return RunSpec(name, task="digits-graph", settings={"task.hidden": "8", "n": "40"}, **size)
    if name == "coded-linear":
        return RunSpec(name, task="breast-cancer", settings={}, **size)
    own: dict[str, Any] = {"evaluate_every": 4} if "topology" in system.needs else {}
    own |= {"transport": "hub"} if "transport" in system.defaults and not system.needs else {}
    return RunSpec(name, settings={"task.hidden": "16", "lr": 0.05, **own}, **size)


def of_row(name: str, seed: int, faulty: bool) -> Record:
    """Return the record of one run of a row."""
    record: Record = {}
    with tempfile.TemporaryDirectory() as folder:
        whole, watch = _run_row(name, seed, faulty, record)
        record |= watch.record()
        record["rounds"] = [] if whole is None else [_of_round(r) for r in whole.rounds]
        record["models"] = [] if whole is None else [digest_of(whole.arrays)]
        file, stopped = Path(folder, "run.ckpt"), {}
        _run_row(name, seed, faulty, stopped, checkpoint=file, stop=True)
        again, _ = _run_row(name, seed, faulty, stopped, checkpoint=file)
        # A run that ends before its time ends so again.
        same = stopped.get("ended") == record.get("ended")
        record["resumed"] = same and (again is None or [digest_of(again.arrays)] == record["models"])
    return record


def _run_row(
    name: str, seed: int, faulty: bool, record: Record, *, checkpoint: Path | None = None, stop: bool = False
) -> tuple[Any, Watch]:
    watch, result = Watch(honest), None

    def grid(app: Any, nodes: int, **options: Any) -> InProcessGrid:
        return InProcessGrid(app, nodes, **options | {"fault": plan(seed) if faulty else None})

    def halt(found: Any) -> None:
        if stop and found.round == STOP:
            raise KeyboardInterrupt

    former = inprocess.client_app, inprocess.InProcessGrid
    inprocess.client_app, inprocess.InProcessGrid = watch, grid
    try:
        with ended(record), contextlib.suppress(KeyboardInterrupt):
            result = engines.run(spec_of(name, seed), on_round=halt, checkpoint=checkpoint)
    finally:
        inprocess.client_app, inprocess.InProcessGrid = former
    return result, watch


def _of_round(found: Any) -> Record:
    return {"failures": found.failures, **_figures(found.metrics)}


# --- experiments ---


def of_page(name: str) -> Record:
    """Return the record of an experiment at its smallest size."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "fedcomp.experiments.run", name, "--quick", "--json", "--out", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    document = json.loads(done.stdout)
    record: Record = {f"claim: {c['name']}": [*numbers(c["value"]), c["ok"]] for c in document["claims"]}
    for place, table in enumerate(document["findings"]["tables"], 1):
        # By place, and column by column: a caption may be said better, and seconds stand beside what repeats.
        for column, cells in enumerate(zip(*table["rows"], strict=True), 1):
            record[f"table {place}, column {column}"] = short([*numbers(cells)])
    for place, figure in enumerate(document["findings"]["figures"], 1):
        record[f"figure {place}"] = short([*numbers(figure)])
    return record


def numbers(part: Any) -> Iterator[float | None]:
    """Yield the numbers of a part of a document in their order, with the six digits a reader may see; no texts."""
    if isinstance(part, list | tuple):
        for each in part:
            yield from numbers(each)
    elif isinstance(part, dict):
        for _, each in sorted(part.items()):
            yield from numbers(each)
    elif part is None or isinstance(part, int | float):
        yield None if part is None else float(f"{part:.6g}")


# --- all of them ---


def names() -> list[str]:
    """Return what there are records of: paths, then rows, then experiments."""
    kinds = {"path": PATHS, "row": SYSTEMS, "page": CATALOG}
    return [f"{kind}: {name}" for kind, table in kinds.items() for name in table]


def record_of(name: str, seed: int, faulty: bool) -> Record:
    """Return the record of one run of a path or a row, as it is kept."""
    kind, _, which = name.partition(": ")
    with quiet():
        return compact(of_path(PATHS[which], seed, faulty) if kind == "path" else of_row(which, seed, faulty))


def compact(record: Record) -> Record:
    """Return a record with its long parts as digests; what a reader wants to see stays as it is."""
    kept = {key: value for key, value in record.items() if key not in ("reports", "rounds")}
    figures = record.get("reports") or record.get("rounds") or []
    reasons: Counter[str] = Counter()
    for found in figures:
        for key, texts in found.items():
            if key.endswith("_because"):
                reasons.update(texts)
    kept["refused"] = dict(sorted(reasons.items()))
    kept["used"] = [found.get("report.compressed", 0) + found.get("report.plain", 0) for found in figures]
    epsilons = [v for found in figures for k, v in found.items() if "epsilon" in k and isinstance(v, int | float)]
    if epsilons:
        kept["epsilon"] = epsilons[-1]
    kept["figures"] = short(figures)
    return kept


def runs(chosen: Iterable[str]) -> Iterator[tuple[str, Record]]:
    """Yield every run's name and record."""
    for name in chosen:
        kind, _, which = name.partition(": ")
        if kind == "page":
            yield name, of_page(which)
            continue
        for faulty in (False, True):
            for seed in SEEDS:
                yield run_name(name, seed, faulty), record_of(name, seed, faulty)


def run_name(name: str, seed: int, faulty: bool) -> str:
    """Return under which name a run is kept."""
    return f"{name}, seed {seed}{', faults' if faulty else ''}"


def differing(old: Mapping[str, Record], new: Mapping[str, Record]) -> list[str]:
    """Return what differs, a line for each aspect of each run."""
    lines = []
    for name, record in new.items():
        before = old.get(name)
        if before is None:
            lines.append(f"{name}: there is no record of it")
            continue
        for aspect in sorted({*record, *before}):
            was, found = before.get(aspect), record.get(aspect)
            if was not in (found, UNSTEADY):
                lines.append(f"{name}: {aspect} was {json.dumps(was)[:160]}, is {json.dumps(found)[:160]}")
    return lines


def stored(folder: Path = HERE) -> dict[str, Record]:
    """Return all records that are kept."""
    found: dict[str, Record] = {}
    for file in FILES.values():
        kept = folder / file.name
        found |= json.loads(kept.read_text()) if kept.exists() else {}
    return found


def write(chosen: list[str]) -> None:
    """Make the records, each twice: an aspect that does not repeat is kept as such."""
    for name in chosen:
        found = dict(runs([name]))
        for run, again in runs([name]):
            found[run] = {key: v if again.get(key) == v else UNSTEADY for key, v in found[run].items()}
        file = FILES[name.partition(": ")[0]]
        held = json.loads(file.read_text()) if file.exists() else {}
        # A run of a system is called by its name and what follows a comma.
        held = {run: record for run, record in held.items() if run.partition(", seed ")[0] != name} | found
        file.write_text(json.dumps(held, indent=0, sort_keys=True) + "\n")
        print(name, "written", flush=True)


def check(chosen: list[str], against: str | None) -> int:
    """Print what differs; return the status of the command."""
    old = stored() if against is None else _made_at(against, chosen)
    failed = 0
    for run, record in runs(chosen):
        lines = differing(old, {run: record})
        failed += len(lines)
        print("\n".join(lines) if lines else f"{run}: as it was", flush=True)
    return 1 if failed else 0


def _made_at(commit: str, chosen: list[str]) -> dict[str, Record]:
    """Return records made by another commit's code, here and now."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        subprocess.run(["git", "worktree", "add", "--detach", str(copy), commit], cwd=ROOT, check=True)
        try:
            script = copy / Path(__file__).resolve().relative_to(ROOT)
            paths = os.pathsep.join(str(copy / part) for part in ("", "tests"))
            command = [sys.executable, str(script), "write", *chosen]
            subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": paths}, check=True)
            return stored(script.parent)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=ROOT, check=True)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("names", nargs="*", help="as 'path: mean', 'row: topk' or 'page: bits'; default all")
    parser.add_argument("--against", metavar="COMMIT", help="compare with what this commit's code does here")
    given = parser.parse_args()
    chosen = given.names or names()
    if unknown := sorted({*chosen} - {*names()}):
        parser.error(f"nothing is called {unknown[0]!r}: {', '.join(names())}")
    if given.what == "write":
        write(chosen)
        return 0
    return check(chosen, given.against)


if __name__ == "__main__":
    sys.exit(main())
