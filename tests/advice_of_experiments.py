"""Advice of experiments: their options, their runs on disk, what is computed without messages, and deployments."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import math
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from advice import Row, row
from fake_engine import CATALOG, TINY, FakeEngine
from page_reading import ROOT, blocks
from plain_grid import PlainGrid

import fedcomp
from fedcomp.clients.app import app as generic
from fedcomp.clients.edge import own_user
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.experiments import convex, engines, plots
from fedcomp.experiments.advised_app import first_model
from fedcomp.experiments.bench.__main__ import main as bench_main
from fedcomp.experiments.catalog import get_experiment
from fedcomp.experiments.central import Plan, simulate
from fedcomp.experiments.chaos import NODE_FAULTS, schedule
from fedcomp.experiments.decentralised import Energy
from fedcomp.experiments.disks import SmallDisk
from fedcomp.experiments.engines.guarded import GuardedDeployment
from fedcomp.experiments.engines.linked import LinkedDeployment
from fedcomp.experiments.engines.processes import free_ports
from fedcomp.experiments.engines.superlink import APP
from fedcomp.experiments.findings import Claim
from fedcomp.experiments.links import SlowLinks
from fedcomp.experiments.options import Option, option
from fedcomp.experiments.run import RunnerSetup, main
from fedcomp.experiments.security.certificates import Folder, add_nodes, create, read, renew
from fedcomp.experiments.security.link import LinkOptions, prepare
from fedcomp.experiments.security.proxy import Limits, Proxy
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RunSpec
from fedcomp.experiments.store import RunFolder
from fedcomp.experiments.studies.graph_variance import Batches, measured
from fedcomp.experiments.tables import specs_of
from fedcomp.flower.grid import InProcessGrid
from fedcomp.graphs.settings import SamplerSettings
from fedcomp.rules import Int
from fedcomp.tasks import get_task

VERSION = fedcomp.__version__
SMALL: dict[str, Any] = {"task.hidden": "", "lr": 0.2, "batch_size": 16, "max_steps": 1}
PRIVATE: dict[str, Any] = {**SMALL, "delta": 1e-2, "insecure_deterministic": True, "noise_multiplier": 2.0}


def spec(system: str = "topk", *, clients: int = 3, rounds: int = 1, **settings: Any) -> RunSpec:
    return RunSpec(system, rounds=rounds, clients=clients, settings={**SMALL, **settings})


def trained(asked: RunSpec, **options: Any) -> bool:
    """Whether a run on an engine makes all its rounds and ends in another model than the first."""
    result = engines.run(asked, **options)
    first, last = result.rounds[0], result.final
    return last.round == asked.rounds and math.isfinite(last.loss) and last.loss != first.loss


def told(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call whose error, of a kind that is Python's own, is one of the library's."""

    def calling() -> None:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            raise FedcompError(str(error)) from error

    return calling


def bundle(installed: str, of: str = VERSION) -> bool:
    """Whether the app of one version of the library starts where one is installed."""
    source = (APP / "fedcomp_app" / "__init__.py").read_text(encoding="utf-8").replace(VERSION, of)
    found: dict[str, Any] = {}
    with patch.object(fedcomp, "__version__", installed):
        exec(source, found)
    return bool(found["MADE_FOR"] == installed)


def failing(status: int) -> None:
    """Go on as a command line does that has printed its error."""
    if status:
        raise SystemExit


def rows_of(name: str, *assignments: str, **options: Any) -> list[RunSpec]:
    experiment = get_experiment(name)
    return specs_of(experiment, experiment.configure(assignments=assignments, **options))


OWN = Option(3, Int(1), "rounds without progress")


def not_shared() -> None:
    """Name a setting that no two experiments share; what is wrong with a table of an experiment is no user's error."""
    with pytest.raises(ValueError, match="no shared setting") as caught:
        option("patience", 3)
    raise FedcompError(str(caught.value))


def silent_app(path: Path, asks: str) -> Path:
    """Write an app whose server does ``asks`` with a strategy and sends nothing else."""
    (path / "pyproject.toml").write_text('[tool.flwr.app.components]\nserverapp = "server:app"\n')
    (path / "server.py").write_text(
        "import numpy as np\nfrom flwr.app import Array, ArrayRecord\nfrom flwr.serverapp import ServerApp\n"
        "from flwr.serverapp.strategy import FedAvg\napp = ServerApp()\n"
        f"@app.main()\ndef main(grid, context):\n    {asks}\n"
    )
    return path


THREE = "FedAvg(min_available_nodes=3).start(grid, ArrayRecord({'w': Array(np.ones(3, np.float32))}))"


EXPERIMENTS = (
    Row(
        "Give a state dict, or",
        lambda path: fedcomp.advise(silent_app(path, "pass")),
        lambda path: bool(fedcomp.advise({"w": np.ones(100, np.float32)}, rounds=1).candidates),
        long=True,
    ),
    Row(
        "; raise clients",
        lambda path: fedcomp.advise(silent_app(path, THREE), clients=2),
        lambda path: first_model(silent_app(path, THREE), clients=3)["w"].size == 3,
        long=True,
    ),
    Row(
        "give one of the two",
        lambda path: fedcomp.advise(),
        lambda path: bool(fedcomp.advise(parameters=100, rounds=1).candidates),
        long=True,
    ),
    row("write an Option with a rule and a sentence", not_shared, lambda: option("patience", OWN) is OWN),
    row(
        "the app of fedcomp {}", told(lambda: bundle("0.0.7")), lambda: bundle(VERSION) and bundle("0.0.7", of="0.0.7")
    ),
    row("name a benchmark: ", lambda: failing(bench_main([])), lambda: bench_main(["state", "--quick"]) == 0),
    row(
        "name at least one system, for instance systems=topk,qsgd",
        lambda: rows_of("compare", "systems=,"),
        lambda: {each.system for each in rows_of("compare", "systems=topk,qsgd")} >= {"topk", "qsgd"},
    ),
    row(
        "rows are fetched from other owners; give 2 or more",
        lambda: rows_of("gcn", clients=1),
        lambda: {each.clients for each in rows_of("gcn", clients=2)} == {2},
    ),
    row(
        "are too few for {} faults of each kind; give more rounds",
        lambda: schedule(0, 14, 9),
        lambda: all(sum(f.kind == kind for f in schedule(0, 15, 9)) == 3 for kind in NODE_FAULTS),
    ),
    row(
        "every message is sent and received; give both, or neither",
        lambda: energy("1e-9", ""),
        lambda: math.isclose(energy("1e-9", "2e-9").per_byte, 24e-9) and energy("", "").per_byte is None,
    ),
    row(
        "unknown comparison {}; use one of {}",
        told(lambda: Claim("a", 1.0, "=<", 1.0, "test")),
        lambda: [op for op in ("<", "<=", "==", ">", ">=") if Claim("a", 1.0, op, 2.0, "test").ok] == ["<", "<="],
    ),
    row(
        "use sampler='skewed', favour='owned' and keep_self=False",
        lambda: moments(keep_self=True),
        lambda: moments(sampler="skewed", favour="owned", keep_self=False),
    ),
    row(
        "bits per second is not valid: give 1e3 to 1e10",
        lambda: SlowLinks(2, 10.0),
        lambda: [SlowLinks(2, rate).up for rate in (1e3, 1e10)] == [1e3, 1e10],
    ),
)


def energy(sent: str, received: str) -> Energy:
    return Energy.of({"energy_tx": sent, "energy_rx": received})


def moments(**settings: Any) -> bool:
    """Whether the second moment of a sampled layer of a small graph is a ratio of sums that are not empty."""
    found = measured(Batches(get_task("karate"), 2, 4, 1, 6), SamplerSettings(n=4, mode="fixed", scale=2.0, **settings))
    return found["candidates"] > 0 and found["second_moment"] > 0


ON_AN_ENGINE = (
    spec("topk", fraction=0.5),
    spec("topk", downlink="qsgd"),
    spec("topk", inner="fedmedian"),
    spec("identity", **{"task.hidden": "256,256", "task.model": "cnn", "task.batch_norm": True}),
    spec("factors", **{"codec.mode": "dad", "codec.i_know_inputs_are_visible": True}),
    spec("conditional"),
    RunSpec("dpsgd", rounds=2, clients=3, settings={"task.hidden": ""}),
    spec("topagg", **{**PRIVATE, "k": 40, "downlink": "qsgd"}),
    spec("dp-fedavg", **{**PRIVATE, "clip": 1.0}),
)


def refused_without_messages() -> None:
    for asked in ON_AN_ENGINE[1:]:
        with pytest.raises(ConfigError, match=r"without messages .*; run it on an engine$"):
            simulate(*Plan.of(asked))
    simulate(*Plan.of(ON_AN_ENGINE[0]))


def optimal(name: str, **options: Any) -> bool:
    """Whether the gradient is zero, but for rounding, at what is called the optimum."""
    problem = convex.Convex.of(get_task(name, partition="sorted", **options), 2)
    return bool(np.abs(problem.gradients(problem.optimum).mean(axis=0)).max() < 1e-9)


def rests(lr: float) -> bool:
    """Whether D-PSGD does not move from what is called its fixed point."""
    problem = convex.Convex.of(get_task("breast-cancer", l2=0.1, partition="sorted"), 2)
    weights = np.array([[0.7, 0.3], [0.3, 0.7]])
    with patch.object(convex, "_NEWTON_STEPS", 8):
        x = convex.fixed_point(problem, weights, lr)
    slopes = np.stack([problem.gradients(x[i])[i] for i in range(2)])
    return bool(np.abs(weights @ x - lr * slopes - x).max() < 1e-9)


COMPUTED = (
    row(
        "without messages {}; run it on an engine",
        refused_without_messages,
        lambda: all(trained(asked) for asked in ON_AN_ENGINE),
        long=True,
    ),
    row(
        "use a logistic task with a larger l2",
        lambda: optimal("breast-cancer", model="svm", l2=0.1),
        lambda: optimal("breast-cancer", l2=0.1),
    ),
    row("Newton steps at lr={}; use a smaller step", lambda: rests(1e9), lambda: rests(0.1)),
)


def tiny(path: Path, *words: str, stops: bool = False, **changed: Any) -> int:
    """Call the command line with an experiment that counts; ``stops``: interrupted in the second round."""
    engine = FakeEngine({("sparse", 2): KeyboardInterrupt()} if stops else None)
    catalog = {**CATALOG, "tiny": dataclasses.replace(TINY, **changed)}
    setup = RunnerSetup(catalog, engine, check=lambda spec: None)
    # Drawing takes ten times as long as all else.
    with patch.object(plots, "line_plot", lambda *_, **__: ""):
        return main([*words, "--out", str(path)], setup=setup)


def interrupted(path: Path, *words: str, damage: Callable[[Path], object] = print, **changed: Any) -> int:
    """Interrupt a run, change its folder, and resume it."""
    assert tiny(path, "tiny", "--rounds", "3", stops=True) == 130
    damage(RunFolder.find(path, "last").path)
    return tiny(path, "--resume", "last", *words, **changed)


def ends(path: Path, *words: str, finished: int = 2, **changed: Any) -> bool:
    """Whether a command ends with every row of the experiment finished."""
    status = tiny(path, *words, **changed)
    return status == 0 and all_rows(path, finished)


def all_rows(path: Path, rows: int = 2) -> bool:
    folder = RunFolder.find(path, "last")
    return len(folder.specs) == rows and all(folder.row(spec).load() is not None for spec in folder.specs)


def stored(text: str, damage: Callable[[Path], object] = print, **changed: Any) -> Row:
    """Return a row about a run that cannot be resumed, beside which another is to be started."""

    def resumed(path: Path) -> int:
        return interrupted(path, damage=damage, **changed)

    def started(path: Path) -> bool:
        return resumed(path) != 0 and ends(path, "tiny", **changed)

    return Row(text, lambda path: failing(resumed(path)), started)


MORE_ROWS = {**TINY.rows, "another": "qsgd"}


def config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text)


def compared(path: Path, damage: Callable[[Path], object], *mend: str, stops: bool = False) -> int:
    """Compare two runs, the second of which was interrupted or damaged, and then mended by a command."""
    assert tiny(path, "tiny") == 0
    assert tiny(path, "tiny", stops=stops) == (130 if stops else 0)
    names = sorted(each.name for each in path.glob("*-tiny*"))
    damage(path / names[1])
    if mend:
        assert tiny(path, *mend) == 0
        names = sorted(each.name for each in path.glob("*-tiny*"))
    return tiny(path, "--compare", names[0], names[-1])


OTHER = {"options": {**TINY.options, "more": Option(1, Int(), "an option of a later version")}}

RUNS = (
    Row(
        "leave the name out or start a new run",
        lambda path: failing(interrupted(path, "measured")),
        lambda path: interrupted(path) == 0 and all_rows(path) and ends(path, "measured", finished=0),
    ),
    Row(
        "has no private system that a budget could end; leave --budget out",
        lambda path: failing(tiny(path, "tiny", "--budget", "1")),
        lambda path: ends(path, "tiny"),
    ),
    Row(
        "cannot make a run folder in {}: {}; choose another with --out",
        lambda path: failing(tiny(below_a_file(path), "tiny")),
        lambda path: ends(path / "other", "tiny"),
    ),
    stored("its settings have other names; start a new run", **OTHER),
    Row(
        "its rows differ; start a new run",
        lambda path: failing(interrupted(path, rows=MORE_ROWS)),
        lambda path: interrupted(path, rows=MORE_ROWS) != 0 and ends(path, "tiny", finished=3, rows=MORE_ROWS),
    ),
    Row(
        "resume without it, or start a new run",
        lambda path: failing(interrupted(path, "--rounds", "4")),
        lambda path: interrupted(path) == 0 and all_rows(path) and ends(path, "tiny", "--rounds", "4"),
    ),
    stored("cannot be read ({}); start a new run", config("{")),
    stored("this version reads {}; start a new run", config('{"format": 99}')),
    Row(
        "is not finished; continue it with --resume {}",
        lambda path: failing(compared(path, print, stops=True)),
        lambda path: compared(path, print, "--resume", "last", stops=True) == 0,
    ),
    Row(
        "cannot be read ({}); run the experiment again",
        lambda path: failing(compared(path, lambda folder: (folder / "summary.json").write_text("{"))),
        lambda path: compared(path, lambda folder: (folder / "summary.json").write_text("{"), "tiny") == 0,
    ),
)


def below_a_file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file" / "runs"


def left(path: Path, seed: int, *, remove: bool = False) -> bool:
    """Whether a run of another seed, or of the same one, goes on from the checkpoint that one left."""
    asked = spec()
    engines.run(asked, checkpoint=path / "checkpoint")
    if remove:
        (path / "checkpoint").unlink()
    return trained(dataclasses.replace(asked, seed=seed, rounds=2), checkpoint=path / "checkpoint")


CAPPED = RunSpec("dp-fedavg", rounds=2, clients=3, settings={**PRIVATE, "clip": 1.0, "sampling": "capped", "cap": 5})


def released(path: Path, files: tuple[str, str], **settings: Any) -> bool:
    """Whether a run goes on with the ledger of another one when its nodes come back under other ids."""
    asked = dataclasses.replace(CAPPED, settings={**CAPPED.settings, **settings})
    engines.run(asked, privacy=path / files[0])
    return trained(dataclasses.replace(asked, seed=2), privacy=path / files[1])


def nodes_online(online: int, clients: int) -> bool:
    """Whether a run over so many nodes trains all of its clients."""
    with InProcessGrid(generic, online) as grid:
        return serve(spec(clients=clients, start_timeout=0.1), grid).final.replies == clients


def started_late() -> bool:
    """Whether a run with a longer start_timeout waits for a node that starts meanwhile."""
    with InProcessGrid(generic, 3) as grid:
        grid.remove_node(grid.node_id_of(2))
        timer = threading.Timer(0.3, grid.add_node, [2])
        timer.start()
        try:
            return serve(spec(start_timeout=60.0), grid).final.replies == 3
        finally:
            timer.join()


def claimed(*partitions: int) -> bool:
    """Whether a run over nodes that come with these partition ids draws its cohort of two, and both answer."""
    with InProcessGrid(generic, 3, node_config=lambda i: {"partition-id": partitions[i]}) as grid:
        return serve(spec(fraction=0.9), PlainGrid(grid)).final.replies == 2


def nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        on_cluster(held.getsockname()[1])


def on_cluster(port: int) -> bool:
    return trained(dataclasses.replace(spec(), engine="ray"), ray_address=f"127.0.0.1:{port}")


def as_on_the_page() -> bool:
    """Whether the error's commands are the page's, which tests/experiments/test_places.py starts a cluster with."""
    with pytest.raises(ConfigError) as error:
        on_cluster(6379)
    commands = re.findall(r"'(ray start .*?)'", str(error.value).replace("127.0.0.1", "10.0.0.1"))
    lines = [line for block in blocks(ROOT / "docs" / "reference" / "engines.md") for line in block.text.splitlines()]
    return len(commands) == 2 and {line.partition("#")[0].strip() for line in lines} >= set(commands)


def without_proc() -> bool:
    exists = Path.exists
    with patch.object(Path, "exists", lambda self: self != Path("/proc/self/stat") and exists(self)):
        return trained(dataclasses.replace(spec(), engine="superlink"))


def disks(states: Path | None) -> bool:
    """Whether the state folder of each of two nodes of a deployment is on a disk of its own."""
    made = GuardedDeployment(SlowLinks(2, 1e6), states=states, disk=1 << 20)
    made.folder = Path()
    with patch.object(SmallDisk, "__enter__", lambda disk: disk), patch.object(LinkedDeployment, "_start"):
        made._start()
    return [each.path for each in made.disks] == [states / "0", states / "1"]


SERVED = (
    Row(
        "the file to start again", lambda path: left(path, 1), lambda path: left(path, 0) and left(path, 1, remove=True)
    ),
    Row(
        "start a new run, with sampling=everyone if it is to go on when nodes come back",
        lambda path: released(path, ("a", "a")),
        lambda path: released(path, ("a", "b")) and released(path, ("c", "c"), sampling="everyone", cap=0),
    ),
    row(
        "start the others, set clients={}",
        lambda: nodes_online(2, 3),
        lambda: nodes_online(3, 3) and nodes_online(2, 2) and started_late(),
    ),
    row("start each node with a partition-id of its own", lambda: claimed(0, 1, 1), lambda: claimed(0, 1, 2)),
    row("--port={}' on {}, and join it with 'ray start --address={}'", nobody_listens, as_on_the_page, long=True),
    Row(
        "keeps the clients' state to itself; use engine=inprocess",
        lambda path: trained(dataclasses.replace(spec(), engine="ray"), checkpoint=path / "checkpoint"),
        lambda path: left(path, 0),
        long=True,
    ),
    row(
        "is outside 1 to {}; use engine=inprocess for more",
        lambda: trained(dataclasses.replace(spec(clients=65), engine="superlink")),
        lambda: trained(spec(clients=65)),
    ),
    row("runs on Linux only; use engine=inprocess", without_proc, lambda: trained(spec())),
    Row("a disk of its own is for a state folder; give states=", lambda path: disks(None), disks),
)


def ended_authority(path: Path) -> None:
    folder = create(path / "keys", ["localhost"], 1, now=datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC))
    renew(folder, now=datetime.datetime(2029, 12, 1, tzinfo=datetime.UTC))


def another_authority(path: Path) -> bool:
    """Whether a node with ca.crt and a key of a new folder believes its server, and is known to it."""
    now = datetime.datetime(2029, 12, 1, tzinfo=datetime.UTC)
    folder = create(path / "new", ["localhost"], 1, now=now)
    renew(folder, now=now)
    read(folder.server).verify_directly_issued_by(read(folder.ca))
    return (folder.nodes / "node-0").exists() and folder.nodes / "node-0.pub" in folder.public_keys()


def two_at_once(path: Path) -> None:
    folder = create(path / "keys", ["localhost"], 1)
    with patch.object(Folder, "next_node", lambda folder: 0):
        add_nodes(folder, 1)


def one_after_the_other(path: Path) -> bool:
    folder = create(path / "keys", ["localhost"], 1)
    return add_nodes(folder, 1) == ["node-1"] and len({key.read_bytes() for key in folder.public_keys()}) == 2


def linked(path: Path, secret: bytes | None = None, *, remove: bool = False) -> bool:
    """Whether a link can start, with a whole secret of its own."""
    public, port = free_ports(2)
    made = LinkOptions(Folder(path), ("127.0.0.1", public), port, path / "link" / "state.db", True, Limits())
    if secret is not None:
        made.folder.kept.mkdir(parents=True)
        made.folder.secret.write_bytes(secret)
    if remove:
        made.folder.secret.unlink()
    listener, _ = prepare(made)
    listener.close()
    return len(made.folder.secret.read_bytes()) == 64


def without_sock_diag(path: Path) -> bool:
    with patch.object(own_user, "owner", side_effect=OSError("Protocol not supported")):
        return linked(path)


async def called(full: str, times: int) -> list[bytes]:
    """Call through a proxy that has no room in its first call; return what is answered each time."""
    body = b"a" * 100_000

    async def superlink(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + await reader.readexactly(len(body)))

    async with await asyncio.start_server(superlink, "127.0.0.1", 0) as server:
        proxy = Proxy(server.sockets[0].getsockname()[1], limits=Limits(queue=0.05, linger=0.05), say=lambda _: None)
        listener = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(proxy.serve(listener))
        found = []
        for number in range(times):
            with contextlib.ExitStack() as stack:
                if number == 0:
                    stack.enter_context(getattr(proxy, full).hold("10.0.0.1", proxy.limits.all_bytes))
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                head = b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                writer.write(head + b"Content-Length: 100000\r\n\r\n" + body)
                found.append(await reader.read())
                writer.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        listener.close()
    return found


def crowded(text: str, full: str) -> Row:
    """Return a row about a call that finds no room on its way through the proxy."""

    def refused() -> None:
        raise FedcompError(asyncio.run(called(full, 1))[0].decode())

    def passes() -> bool:
        first, second = asyncio.run(called(full, 2))
        return first.startswith(b"HTTP/1.1 503") and second.endswith(b"\r\n\r\n" + b"a" * 100_000)

    return row(text, refused, passes)


SECURITY = (
    Row("make a new folder, and give every node ca.crt and a key from there", ended_authority, another_authority),
    Row("was made by another process meanwhile; try again when that has ended", two_at_once, one_after_the_other),
    Row("use a machine with Linux's sock_diag", without_sock_diag, linked),
    Row(
        "remove it, and a new one is made",
        lambda path: linked(path, b"cut off"),
        lambda path: linked(path, b"cut off", remove=True),
    ),
    crowded("too many bodies are under way; try again", "_bodies"),
    crowded("too many answers are under way; try again", "_answers"),
)

ROWS: tuple[Row, ...] = (*EXPERIMENTS, *COMPUTED, *RUNS, *SERVED, *SECURITY)
