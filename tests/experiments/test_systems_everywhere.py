"""On Ray and on a SuperLink systems give the same arrays and the same bytes as in this process.

An engine carries messages and keeps clients' states; what systems do with these is in tests/systems and, for every row,
in tests/golden. So there is one row here for each way in which messages and states differ.
"""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from private_rows import small
from quick_nodes import quicken

from fedcomp.clients.app import app as client
from fedcomp.experiments import engines, slept
from fedcomp.experiments.engines import ray, superlink
from fedcomp.experiments.engines.superlink import Deployment
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import PRIVACY_FILE, RunResult, RunSpec
from fedcomp.experiments.systems import SYSTEMS
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit
from fedcomp.privacy.statement import Statement

# All systems share one simulation, whose start is in the time of the first test.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

SETTINGS = {"task.hidden": "32", "task.partition": "dirichlet:0.5", "max_steps": 4}
EARLY = ["gradient-code"]
"""Systems that stop at the first answers that are enough: whose these are, and so the bytes, depends on the engine."""

ROWS = ["adacomp", "scalecom", "power-sgd", "lgc"]
"""One exchange and a memory; two exchanges, an update that waits and a support that all are sent; a basis that follows
from steps; an autoencoder that is trained on the server and kept by nodes."""

PRIVATE = ["topagg", "record-dp"]
"""A budget that ends the run, and ledgers of the nodes' own."""

DEPLOYED = ["scalecom", "lgc"]
PHASES: dict[str, tuple[int, dict[str, Any]]] = {
    "lgc": (5, {"warmup_rounds": 1, "training_rounds": 2, "codec.raw": 0, "codec.density": 0.1}),
}
"""Rounds and settings of systems whose first rounds are all alike: the last two of these are in the fitted basis, and
send latents."""

DEPLOYED_PRIVATE = "topagg"
BUDGETS = {"topagg": 2.5}
"""Of the private rows those that a budget ends after the first of two rounds."""
PAID_BY_NODES = [name for name in PRIVATE if name == "record-dp"]
"""Rows whose nodes have ledgers of their own: where the nodes are the same, the second is paid on top of the first."""
APP = Path(__file__).parent / "several_app"
GOSSIP = {
    "sparse-push": {"topology": "one-peer", "skew_rounds": "auto", "momentum": 0.9},
    "dyna-cold": {"dtype": "float64", "batch_size": 0},
}
"""Of the systems with a graph, two whose messages and states differ most. In this process all of them have the bits of
the run without messages (test_gossip_systems.py)."""


def spec(name: str, engine: str = "inprocess", clients: int = 2) -> RunSpec:
    rounds, own = PHASES.get(name, (2, {}))
    return RunSpec(name, rounds=rounds, clients=clients, seed=3, engine=engine, settings={**SETTINGS, **own})


def edad(engine: str = "inprocess") -> RunSpec:
    """One batch a round: captured in torch on the node, in a process of its own, and put together on the server."""
    settings = {**SETTINGS, "codec.mode": "edad", "codec.chain": "layers.0.weight:relu,layers.1.weight"}
    settings |= {"codec.i_know_inputs_are_visible": True, "max_steps": 1, "batch_size": 8}
    return RunSpec("factors", rounds=2, clients=2, seed=3, engine=engine, settings=settings)


def still(engine: str = "inprocess") -> RunSpec:
    """Steps so small that losses settle: what nodes decide by goes through the engine's own client state."""
    settings = {**SETTINGS, "lr": 1e-6, "max_steps": 1}
    return RunSpec("conditional", rounds=62, clients=2, seed=3, engine=engine, settings=settings)


def linear(engine: str = "inprocess") -> RunSpec:
    """Coded data of a linear task: stored rows go through the engine's own client state, partitions to the peers."""
    settings = {"parities": 1, "lr": 0.3, "task.l2": 0.001, "transport": "peers"}
    return RunSpec("coded-linear", task="digits-zero", rounds=2, clients=2, engine=engine, settings=settings)


def gossip(name: str, engine: str = "inprocess") -> RunSpec:
    settings = {"task.hidden": "32", "task.partition": "dirichlet:0.5", **GOSSIP[name]}
    return RunSpec(name, rounds=2, clients=2, seed=3, engine=engine, settings=settings)


def datalens(engine: str = "inprocess") -> RunSpec:
    """Teachers and their optimisers go through the engine's own client state; the accountant is not the engine's."""
    settings = {
        "teachers": 3,
        "population": 1442,
        "k": 28,
        "images": 4,
        "pretrain": 2,
        "noise_multiplier": 3.0,
        "task.hidden": "32",
    }
    settings |= {"insecure_deterministic": True, "task.classifier_epochs": 2, "task.synthetic": 200}
    return RunSpec("datalens", task="digits-generator", rounds=2, clients=2, seed=3, engine=engine, settings=settings)


def on_graph(engine: str = "inprocess") -> RunSpec:
    """Owners of parts of a graph: rows, norms and adjacency rows stay in the engine's own client state."""
    settings = {"mode": "measured", "task.structure": "halo", "task.cut": "random", "cache": "lru", "cache_bytes": 4000}
    settings |= {"codec": "topk", "codec.density": 0.1, "task.hidden": "128", "fraction_evaluate": 1.0}
    settings |= {"n": "6", "batch_size": 4, "lr": 0.3}
    return RunSpec("skewed-gcn", task="karate", rounds=2, clients=2, seed=3, engine=engine, settings=settings)


def same(here: RunResult, there: RunResult, *, addressed: bool = False) -> None:
    """Compare two runs; where peers are ``addressed``, by folders here and by hosts and ports there, the messages that
    name them to each other are of unlike lengths."""
    assert {k: v.tobytes() for k, v in here.arrays.items()} == {k: v.tobytes() for k, v in there.arrays.items()}
    for a, b in zip(here, there, strict=True):
        assert (a.accuracy, a.loss) == (b.accuracy, b.loss)
        assert a.uplink_payload_bytes == b.uplink_payload_bytes
        assert addressed or a.downlink_payload_bytes == b.downlink_payload_bytes
        assert a.metrics == b.metrics


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where private rows on other engines keep what they released."""
    return tmp_path_factory.mktemp("ledgers")


class Either(ClientApp):
    """The clients of all systems, and those of overlapping rounds, in one simulation."""

    def __call__(self, message: Message, context: Context) -> Message:
        slow = "variation" in message.content.config_records.get("config", {})
        return (slept.client if slow else client)(message, context)


OVERLAPPING = 6
"""Rounds."""


def overlapping(grid: MeteredGrid, kind: str, **options: int) -> tuple[np.ndarray, int]:
    """Train with several rounds in flight; return the weights and the number of steps."""
    strategy = slept.build(kind, options)
    config = ConfigRecord({"seed": 3, "sleep": 0.01, "variation": 0.0})
    start = ArrayRecord({"w": Array(np.zeros(slept.SIZE, np.float32))})
    # Nodes are known to the meter by their partitions once they have answered, which cohorts need before.
    found = fit(strategy, grid, start, OVERLAPPING, train_config=config)
    return found.arrays["w"].numpy(), strategy.steps


@pytest.fixture(scope="module")
def on_ray(ledgers: Path) -> dict[str, Any]:
    """All of them one after the other on one simulation: its start costs more."""
    results: dict[str, Any] = {}

    def preceded(last: RunSpec, grid: Grid, **given: Any) -> RunResult:
        results["pipelined"] = overlapping(MeteredGrid(grid), "pipelined", width=2)
        results["buffered"] = overlapping(MeteredGrid(grid), "buffered", concurrency=2, buffer=1)
        for name in ("fedavg", *ROWS[1:], *EARLY):
            results[name] = serve(spec(name, "ray"), grid)
        results["edad"] = serve(edad("ray"), grid)
        results["still"] = serve(still("ray"), grid)
        for name in GOSSIP:
            results[name] = serve(gossip(name, "ray"), grid)
        for name in PRIVATE:
            kept = ledgers / f"{name}.jsonl"
            one = small(name, engine="ray", clients=2, budget=BUDGETS.get(name, 0.0))
            results[name] = serve(one, grid, privacy=kept)
        results["coded-linear"] = serve(linear("ray"), grid)
        results["datalens"] = serve(datalens("ray"), grid)
        results["skewed-gcn"] = serve(on_graph("ray"), grid)
        # The last one as the engine itself serves it.
        return serve(last, grid, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "serve", preceded)
        patch.setattr(ray, "client_app", Either())
        results[ROWS[0]] = engines.run(spec(ROWS[0], "ray"))
    return results


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", ROWS[0]])
def test_messages_on_ray_are_as_long_as_in_this_process(name: str, on_ray: dict[str, RunResult]) -> None:
    here, there = engines.run(spec(name)), on_ray[name]
    assert there.spec == spec(name, "ray")
    same(here, there)
    for column in ("round", "node", "direction", "message_type"):
        for value in ("messages", "payload"):
            assert here.ledger.by(column, value) == there.ledger.by(column, value)
        # Run, node and task ids are random numbers of variable length, twice per message; nothing else differs.
        wire, messages = here.ledger.by(column, "wire"), here.ledger.by(column, "messages")
        assert all(abs(there.ledger.by(column, "wire")[k] - wire[k]) <= 16 * messages[k] for k in wire)


@pytest.mark.long
def test_overlapping_rounds_give_the_same_bits_on_ray(on_ray: dict[str, Any]) -> None:
    """By cohorts, so that no client's state is written twice at a time."""

    class Reversed(MeteredGrid):
        def get_node_ids(self) -> list[int]:
            return list(reversed(list(super().get_node_ids())))

    # Which node is in which cohort is the engine's order; the two recursions it may give are known.
    known = []
    for kind in (MeteredGrid, Reversed):
        with InProcessGrid(slept.client, 2, seed=3) as grid:
            known.append(overlapping(kind(grid), "pipelined", width=2)[0])
    assert any(np.array_equal(on_ray["pipelined"][0], each) for each in known)
    # Whose updates come first is Ray's matter; that each step has one, and every client its turn, is not.
    assert on_ray["buffered"][1] == OVERLAPPING


@pytest.mark.long
@pytest.mark.parametrize("name", ROWS)
def test_ray_gives_the_same_bits(name: str, on_ray: dict[str, RunResult]) -> None:
    here = engines.run(spec(name))
    same(here, on_ray[name])
    assert on_ray[name].final.metrics["report.compressed"] == 2
    assert here.rounds[0].loss != here.final.loss


@pytest.mark.long
def test_nodes_are_quiet_in_the_same_rounds(on_ray: dict[str, RunResult]) -> None:
    here, there = engines.run(still()), on_ray["still"]
    same(here, there)
    # Nothing was better than the first loss for 60 models; the next round is the first in which the query says so.
    assert [r.metrics["conditional.quiet"] for r in there.rounds[1:]] == [0] * 61 + [2]


@pytest.mark.long
def test_factors_of_single_examples_give_the_same_bits_on_ray(on_ray: dict[str, RunResult]) -> None:
    here = engines.run(edad())
    same(here, on_ray["edad"])
    # Rows of batches, so that it was factors that travelled, and no whole matrix.
    assert here.final.metrics["report.frames.rows of layers.0.weight"] == 8
    assert here.rounds[0].loss != here.final.loss


@pytest.fixture(scope="module")
def one_after_the_other() -> dict[str, RunResult]:
    """Rows paid by nodes, in this process, on the same nodes in the order they have on Ray."""
    with InProcessGrid(client, 2) as grid:
        return {name: serve(small(name, clients=2), grid) for name in PAID_BY_NODES}


@pytest.mark.long
@pytest.mark.parametrize("name", PRIVATE)
def test_private_systems_give_the_same_bits_on_ray(
    name: str, on_ray: dict[str, RunResult], one_after_the_other: dict[str, RunResult], ledgers: Path
) -> None:
    """Noise and samples from a seed; the ledger is beside the run on every engine, and its budget holds on each."""
    own = name in PAID_BY_NODES
    here = one_after_the_other[name] if own else engines.run(small(name, clients=2, budget=BUDGETS.get(name, 0.0)))
    there = on_ray[name]
    same(here, there)
    private(here, there, ledgers / f"{name}.jsonl")


def private(here: RunResult, there: RunResult, ledger: Path) -> None:
    said = [Statement.from_json(dict(result.notes["privacy"], run="")) for result in (here, there)]
    assert said[0] == said[1]
    assert here.notes["ended"] == there.notes["ended"]
    assert bool(here.notes["ended"]) == (here.spec.system in BUDGETS)
    assert here.final.round == (1 if here.notes["ended"] else 2)
    events = [json.loads(line) for line in ledger.read_text().splitlines()[1:]]
    assert len(events) >= here.final.round


@pytest.mark.long
@pytest.mark.parametrize("name", GOSSIP)
def test_7_16_decentralised_systems_give_the_same_bits_on_ray(name: str, on_ray: dict[str, RunResult]) -> None:
    here, there = engines.run(gossip(name)), on_ray[name]
    for a, b in zip(here.rounds[1:], there.rounds[1:], strict=True):
        # Ids of runs and nodes, which the engine draws, are numbers of no fixed length, and whole messages hold them.
        for key in ("gossip.overhead", "gossip.observation"):
            assert a.metrics.pop(key) == pytest.approx(b.metrics.pop(key), rel=0.01)
    same(here, there)
    assert here.rounds[0].loss != here.final.loss
    assert here.final.metrics["gossip.edge"] > 0


@pytest.mark.long
def test_a_graph_run_gives_the_same_bits_on_ray(on_ray: dict[str, RunResult]) -> None:
    here, there = engines.run(on_graph()), on_ray["skewed-gcn"]
    same(here, there)
    assert here.rounds[0].loss != here.final.loss
    for name in ("gcn.feature_bytes_link", "gcn.structure_bytes", "clients.gcn.evaluate_feature_bytes_link"):
        assert here.rounds[1].metrics[name] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", EARLY)
def test_whoever_answers_first_on_ray_gives_the_same_bits(name: str, on_ray: dict[str, RunResult]) -> None:
    here, there = engines.run(spec(name)), on_ray[name]
    assert {k: v.tobytes() for k, v in here.arrays.items()} == {k: v.tobytes() for k, v in there.arrays.items()}
    assert [(r.accuracy, r.loss) for r in here] == [(r.accuracy, r.loss) for r in there]
    assert here.rounds[0].loss != here.final.loss
    assert there.uplink_payload_bytes <= here.uplink_payload_bytes


STEPPED = {f"width {w}": {"kind": "pipelined", "options": {"width": w}, "rounds": OVERLAPPING} for w in (1, 2)}
BUFFERED = {"kind": "buffered", "options": {"concurrency": 2, "buffer": 1}, "rounds": OVERLAPPING}


@pytest.fixture(scope="module")
def deployed(ledgers: Path) -> dict[str, Any]:
    """Systems one after the other in one run: each message costs a process, the start of a run five of them."""
    asked = [*(spec(name, "superlink") for name in DEPLOYED), linear("superlink"), edad("superlink")]
    asked += [small(DEPLOYED_PRIVATE, engine="superlink", clients=2, budget=BUDGETS[DEPLOYED_PRIVATE])]
    # Last: whoever was not waited for is busy with it for a while.
    asked += [spec(name, "superlink") for name in EARLY]
    with pytest.MonkeyPatch.context() as patch:
        # The bundle holds the two apps only.
        quicken(patch, "fedcomp.clients.app", "torch")
        with Deployment(2, peers=True) as deployment:
            out, specs = deployment.home("out"), deployment.folder / "specs.json"
            specs.write_text(json.dumps([one.to_run_config() for one in asked]), encoding="utf-8")
            deployment.run_app({"specs": str(specs), "out": str(out)}, limit=900, project=APP)
            assert deployment.runs()[0]["status"] == "finished:completed", deployment.logs(40)
            shutil.copy(out / DEPLOYED_PRIVATE / PRIVACY_FILE, ledgers / "deployed")
            found: dict[str, Any] = {one.system: RunResult.load(out / one.system) for one in asked}
            # And rounds in flight at a time, with the nodes that are there.
            patch.setattr(superlink, "Deployment", lambda nodes: nullcontext(deployment))
            rows = {**STEPPED, "buffered": BUFFERED}
            return found | slept.deployed(rows, nodes=2, seed=3, sleep=0.01, variation=0.0, work=0.0, limit=900)


@pytest.mark.long
def test_9_a_superlink_gives_the_recursion_of_overlapping_rounds(deployed: dict[str, Any]) -> None:
    """With two in flight updates are one step old: the second was sent before the first was in the model."""
    orders = ((0, 1), (1, 0))
    expected = [[slept.recursion(3, order, OVERLAPPING, width) for order in orders] for width in (1, 2)]
    assert not np.allclose(expected[0][0], expected[1][0], rtol=0, atol=1e-3)
    for width, either in enumerate(expected, 1):
        # Which node connects first, and is in the first cohort, is chance.
        found = deployed[f"width {width}"]
        assert any(np.allclose(found["weights"], each, rtol=0, atol=1e-5) for each in either)
        assert found["used"] == 2 * OVERLAPPING // width
    assert deployed["buffered"]["steps"] == OVERLAPPING


@pytest.mark.long
@pytest.mark.parametrize("name", EARLY)
def test_whoever_answers_first_in_a_deployment_gives_the_same_bits(name: str, deployed: dict[str, RunResult]) -> None:
    here, there = engines.run(spec(name)), deployed[name]
    assert {k: v.tobytes() for k, v in here.arrays.items()} == {k: v.tobytes() for k, v in there.arrays.items()}
    assert here.rounds[0].loss != there.final.loss
    assert there.final.metrics["coded.received"] >= 1


@pytest.mark.long
def test_a_deployment_gives_the_same_bits_where_the_server_finishes_back_propagation(
    deployed: dict[str, RunResult],
) -> None:
    same(engines.run(edad()), deployed["factors"])


@pytest.mark.long
@pytest.mark.parametrize("name", DEPLOYED)
def test_a_deployment_gives_the_same_bits(name: str, deployed: dict[str, RunResult]) -> None:
    """A memory, an update that waits and weights of an autoencoder go through a SuperNode's own state, a process per
    message."""
    there = deployed[name]
    same(engines.run(spec(name)), there)
    remembers = SYSTEMS[name].build(SYSTEMS[name].resolve({}), 0).codec.remembers
    later = [0] * (there.spec.rounds - 1)
    assert [r.metrics["report.fresh"] for r in there.rounds[1:]] == [2 if remembers else 0, *later]


@pytest.mark.long
def test_a_private_system_gives_the_same_bits_in_a_deployment(deployed: dict[str, RunResult], ledgers: Path) -> None:
    here = engines.run(small(DEPLOYED_PRIVATE, clients=2, budget=BUDGETS[DEPLOYED_PRIVATE]))
    same(here, deployed[DEPLOYED_PRIVATE])
    private(here, deployed[DEPLOYED_PRIVATE], ledgers / "deployed")


@pytest.mark.long
@pytest.mark.parametrize("engine", ["ray", "superlink"])
def test_coded_data_gives_the_same_bits_on_other_engines(engine: str, request: pytest.FixtureRequest) -> None:
    """On Ray partitions go through spools of this machine, in a deployment over TCP from listener to listener."""
    there: RunResult = request.getfixturevalue({"ray": "on_ray", "superlink": "deployed"}[engine])["coded-linear"]
    here = engines.run(linear())
    same(here, there, addressed=engine == "superlink")
    assert [r.peer_payload_bytes for r in here] == [r.peer_payload_bytes for r in there]
    assert here.rounds[1].peer_payload_bytes > 0


@pytest.mark.long
def test_datalens_gives_the_same_bits_on_ray(on_ray: dict[str, RunResult]) -> None:
    here, there = engines.run(datalens()), on_ray["datalens"]
    same(here, there)
    assert here.rounds[0].loss != here.final.loss
    assert there.final.metrics["datalens.answered"] == 2
    assert there.notes["privacy"]["releases"] == 8
    assert there.notes["privacy"]["epsilon"] == here.notes["privacy"]["epsilon"]
