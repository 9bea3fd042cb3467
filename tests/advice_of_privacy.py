"""Advice of private strategies and of what they are made of."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from advice import (
    DENSE,
    KEY,
    NODES,
    PLAN,
    PRIVATE,
    PROMISE,
    VALUES,
    Row,
    decoded,
    ended,
    ledger,
    local,
    quiet,
    row,
    shares,
    system,
    trains,
)
from advice_of_flower import Unmeasured
from advice_of_nodes import GOOD
from datalens_toy import grid as teachers
from datalens_toy import model as images
from datalens_toy import row as taught_row
from datalens_toy import strategy as datalens
from dpsgd_problems import loss, net, records, training
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedMedian, FedProx
from opacus.validators import ModuleValidator
from torch import nn
from toy import client_app, fedavg, model, stack

import fedcomp as fc
from fedcomp.clients.app import app as node_app
from fedcomp.clients.edge import LEDGER_FILE, OWN_BUDGET, STATE_FOLDER, prepare
from fedcomp.clients.private.dpsgd import Trainee, train_privately
from fedcomp.clients.private.mod import private
from fedcomp.flower.records import to_record
from fedcomp.flower.rounds import fit
from fedcomp.privacy.__main__ import main as plan_of
from fedcomp.privacy.accounting import compose
from fedcomp.privacy.adaptive import AdaptiveClip, joint_event
from fedcomp.privacy.audit import farthest, project
from fedcomp.privacy.distributed import DistributedSum
from fedcomp.privacy.entropy import SeededEntropy
from fedcomp.privacy.events import Event
from fedcomp.privacy.ledger import PrivacyLedger
from fedcomp.privacy.local import LocalPolicy, Privatise
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.privacy.statement import make_statement
from fedcomp.privacy.votes import TopkSign, topk_stochastic_sign
from fedcomp.strategies.private.distributed_dp import DistributedDp, NoisyMean
from fedcomp.systems.private.distributed import NoisySum
from fedcomp.systems.private.lsg import LowRank
from fedcomp.tasks import get_task
from fedcomp.tasks.arrays import to_arrays

BALLOT = TopkSign(k=50)


def noise_shares(**options: Any) -> DistributedSum:
    given = {"noise_multiplier": 1.0, "clip": 1.0, "size": 100, "contributors": 4, "noise": "discrete_gaussian"}
    return DistributedSum(**{**given, **options})


NOISE = Event("gaussian", noise_multiplier=1.0)
PRIVATISE = Privatise(1e4, 0.5, insecure_deterministic=True)


def rounds_of(found: PrivacyLedger, rounds: int, nodes: Any = (1, 2), event: Event = NOISE) -> bool:
    for number in range(1, rounds + 1):
        found.record(event, round=number, participants=list(nodes))
    return found.epsilon() > 0


PRIVACY = (
    row(
        "A codec goes outside: Compressed({}(...), codec)",
        lambda: fc.DpFedAvg(fc.Compressed(quiet(), fc.TopK(0.1)), clip=1.0, **PROMISE),
        lambda: trains(fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), fc.TopK(0.1)), PRIVATE),
    ),
    row(
        "make the inner strategy with fraction_evaluate=0.0",
        lambda: fc.DpFedAvg(fedavg(), clip=1.0, **PROMISE),
        lambda: trains(fc.DpFedAvg(fedavg(fraction_evaluate=0.0), clip=1.0, **PROMISE), PRIVATE),
    ),
    row(
        "leave it at 1.0 and give sampling=Sampling(...)",
        lambda: fc.DpFedAvg(quiet(fraction_train=0.5), clip=1.0, **PROMISE),
        lambda: trains(
            fc.DpFedAvg(quiet(fraction_train=1.0), clip=1.0, sampling=fc.Sampling("poisson", rate=0.9), **PROMISE),
            PRIVATE,
            rounds=4,
        ),
    ),
    row(
        "is not known: give population=N",
        lambda: ended(fc.DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "population": 0}), PRIVATE),
        lambda: trains(fc.DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "population": NODES}), PRIVATE),
    ),
    row(
        "adaptive clipping needs Gaussian noise; use noise='discrete_gaussian'",
        lambda: fc.DpFedAvg(quiet(), clip=AdaptiveClip(count_noise=1.0), noise="skellam", **PROMISE),
        lambda: trains(
            fc.DpFedAvg(quiet(), clip=AdaptiveClip(count_noise=1.0), noise="discrete_gaussian", **PROMISE), PRIVATE
        ),
    ),
    row(
        "Put it inside: {}({}(FedAvg(...), ...), codec)",
        lambda: ended(DifferentialPrivacyServerSideFixedClipping(fc.Compressed(quiet(), fc.QSGD(7)), 0.1, 1.0, 4)),
        lambda: trains(fc.Compressed(DifferentialPrivacyServerSideFixedClipping(quiet(), 0.1, 1.0, 4), fc.QSGD(7))),
    ),
    row(
        "is the one that is not trusted. Use sampling='capped' or 'everyone'",
        lambda: local(sampling=fc.Sampling("poisson", rate=0.5)),
        lambda: (
            trains(local(sampling=fc.Sampling("capped", cap=9)), PRIVATE)
            and trains(local(sampling=fc.Sampling("everyone")), PRIVATE)
        ),
    ),
    row(
        "Lsg sends bytes of its own; use it without Compressed, or DpFedAvg with a codec",
        lambda: fc.Compressed(fc.Lsg(quiet(), LowRank(clip=1.0, rank=2), **PROMISE), fc.TopK(0.1)),
        lambda: (
            trains(fc.Lsg(quiet(), LowRank(clip=1.0, rank=2), **PROMISE), PRIVATE)
            and trains(fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), fc.TopK(0.1)), PRIVATE)
        ),
    ),
    row(
        "is a threshold, which mode={} does not have; use mode='threshold'",
        lambda: fc.TopAgg(quiet(), BALLOT, server_lr=0.1, mode="mean", beta=0.5, **PROMISE),
        lambda: trains(fc.TopAgg(quiet(), BALLOT, server_lr=0.1, mode="threshold", beta=0.1, **PROMISE), (private,)),
    ),
    row(
        "use Sampling('capped') or everyone",
        lambda: shares(sampling=fc.Sampling("poisson", rate=0.5)),
        lambda: trains(shares(sampling=fc.Sampling("everyone"))),
    ),
    row(
        "is not a weighted mean; use one of {}, or Compressed around one",
        lambda: fc.RecordDp(quiet(FedMedian), PLAN, records=100),
        lambda: (
            fc.RecordDp(quiet(), PLAN, records=100)
            and fc.RecordDp(fc.Compressed(quiet(), fc.TopK(0.1)), PLAN, records=100)
        ),
    ),
    row(
        "evaluation on clients would release metrics of their records; make",
        lambda: fc.RecordDp(fedavg(), PLAN, records=100),
        lambda: fc.RecordDp(fedavg(fraction_evaluate=0.0), PLAN, records=100),
    ),
    row(
        "checks the updates: write Compressed(..., guard=...) around the mean",
        lambda: fc.RecordDp(fc.Compressed(quiet(), fc.TopK(0.1)), PLAN, records=100, guard=fc.Norms()),
        lambda: fc.RecordDp(fc.Compressed(quiet(), fc.TopK(0.1), guard=fc.Norms()), PLAN, records=100),
    ),
    row(
        "the plan says; use one of the two",
        lambda: fc.RecordDp(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), PLAN, records=100),
        lambda: fc.RecordDp(quiet(), PLAN, records=100) and fc.DpFedAvg(quiet(), clip=1.0, **PROMISE),
    ),
    row(
        "slopes are neither clipped nor noised. Use a codec without forward gradients",
        lambda: fc.ForwardGradients(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), 8),
        lambda: fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), fc.TopK(0.1)),
    ),
)


PRIVATE_PARTS = (
    row(
        "say sampling='poisson', or leave the rate out",
        lambda: fc.Sampling("everyone", rate=0.5),
        lambda: fc.Sampling("poisson", rate=0.5) and fc.Sampling("everyone"),
    ),
    row(
        "does not fit Poisson sampling, whose rounds vary in size; use its rate",
        lambda: fc.Sampling("poisson", rate=0.5).check("zero_out", count=3),
        lambda: fc.Sampling("poisson", rate=0.5).check("zero_out") is None,
    ),
    row(
        "sampling='poisson' with rate = count / population, or adjacency='replace'",
        lambda: fc.Sampling().check("add_remove", count=3),
        lambda: [fc.Sampling("poisson", rate=3 / 9).check("add_remove"), fc.Sampling().check("replace", count=3)],
    ),
    row(
        "pass uniforms=Key(...) or an array, or stochastic=False",
        lambda: topk_stochastic_sign(VALUES, 10),
        lambda: all(
            np.count_nonzero(topk_stochastic_sign(VALUES, 10, **how)) == 10
            for how in ({"uniforms": KEY}, {"uniforms": np.full(10, 0.5)}, {"stochastic": False})
        ),
    ),
    row(
        "give either k or density, the number of votes",
        lambda: TopkSign(),
        lambda: decoded(TopkSign(k=10)).size and decoded(TopkSign(density=0.1)).size,
    ),
    row(
        "with at least one each; raise k, or use ",
        lambda: decoded(TopkSign(k=1, scope="layer")),
        lambda: decoded(TopkSign(k=2, scope="layer")).any() and decoded(TopkSign(k=1, scope="global")).any(),
    ),
    row(
        "use scope='layer', or a policy of only None and 1.0",
        lambda: decoded(TopkSign(k=10), layout=DENSE),
        lambda: decoded(TopkSign(k=10, scope="layer"), layout=DENSE).any() and decoded(TopkSign(k=10)).any(),
    ),
    row(
        "Use adjacency='zero_out' or 'replace'",
        lambda: noise_shares(adjacency="add_remove"),
        lambda: noise_shares(adjacency="zero_out") and noise_shares(adjacency="replace"),
    ),
    row(
        "nobody's is left to count on; lower tolerated, or ask more clients",
        lambda: noise_shares(tolerated=4),
        lambda: noise_shares(tolerated=1) and noise_shares(tolerated=4, contributors=6),
    ),
    row(
        "Raise scale (now {}), or use noise='skellam'",
        lambda: noise_shares(noise_multiplier=0.01, scale=1),
        lambda: (
            noise_shares(noise_multiplier=0.01, scale=1 << 12)
            and noise_shares(noise_multiplier=0.01, scale=1, noise="skellam")
        ),
    ),
    row(
        "Leave the seed out, or set insecure_deterministic=True",
        lambda: SeededEntropy(KEY),
        lambda: (
            SeededEntropy(KEY, insecure_deterministic=True).words(2).size == 2
            and trains(fc.DpFedAvg(quiet(), clip=1.0, **{**PROMISE, "insecure_deterministic": False}), PRIVATE)
            and trains(fc.DpFedAvg(quiet(), clip=1.0, seed=7, **PROMISE), PRIVATE)
        ),
    ),
)


LEDGERS = (
    row("would satisfy it. Use at ", lambda: ledger(delta=0.2), lambda: ledger(delta=1e-2)),
    row(
        "participants, {}. Declare the number of all",
        lambda: rounds_of(ledger(population=1), 1),
        lambda: rounds_of(ledger(population=2), 1),
    ),
    row(
        "Nothing was released: end the run, or plan it with more noise",
        lambda: rounds_of(ledger(budget=6.0), 9),
        lambda: rounds_of(ledger(budget=6.0), 9, event=Event("gaussian", noise_multiplier=9.0)),
    ),
    row(
        "the cap is {}; choose participants by ",
        lambda: rounds_of(ledger(sampling=fc.Sampling("capped", cap=1)), 2),
        lambda: rounds_of(ledger(sampling=fc.Sampling("capped", cap=1)), 1),
    ),
    row(
        "Set count_noise above {}, or have more than {} clients",
        lambda: AdaptiveClip(count_noise=0.01).sum_multiplier(1.0, 4),
        lambda: AdaptiveClip(count_noise=0.6).sum_multiplier(1.0, 4) > 1.0,
    ),
)


def asked(*words: str) -> bool:
    """Ask the command line how much noise is needed; an error that it prints is left to be read."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        if plan_of(["plan", *words]):
            raise SystemExit
    return "releases" in said.getvalue()


def asked_with_the_figure_of_the_text() -> bool:
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        asked("--epsilon", "1", "--noise-multiplier", "0.5")
    return asked("--epsilon", "1", "--noise-multiplier", said.getvalue().split()[-3])


def noise_of(noise: str) -> GridGaussian:
    return GridGaussian(noise_multiplier=2.0**0.5, clip=1.0, size=3, noise=noise)


def one_of_both() -> bool:
    """Whether two releases of one round cost what the event that joins them says."""
    gaussian = noise_of("discrete_gaussian")
    apart = compose([[gaussian.event(size=3), gaussian.event(size=1)]], 1e-5)
    joint = compose([joint_event(1.0, gaussian, gaussian, size=3)], 1e-5)
    return abs(joint.epsilon - apart.epsilon) < 1e-3


def stated(adjacency: str, other: str) -> bool:
    mechanism = GridGaussian(noise_multiplier=2.0, clip=1.0, size=3, adjacency=adjacency)
    said = make_statement(ledger(adjacency=other), mechanism=mechanism, trust="the server", protects="all")
    return said.sensitivity == mechanism.sensitivity * mechanism.step


def of_mean(units: Any) -> Any:
    return np.sum(units, axis=0)


def refining(**options: Any) -> bool:
    """Whether a run goes well whose shares have noise on a grid that is a bit too fine for 16 bits."""
    given = {"clip": 500.0, "tolerated": 1, "scale": 7500, **options}
    clients = given.pop("clients", NODES)
    strategy = DistributedDp(quiet(), fc.ShareSettings(**given), **{**PROMISE, "population": clients})
    app = client_app([fc.compression()])
    with fc.InProcessGrid(app, clients, seed=4) as grid:
        return bool(stack(fit(strategy, grid, model(), 1, timeout=9.0).arrays).any())


def each(module: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")


def stepped(norm: nn.Module | None = None, fix: bool = False, loss: Any = loss, **options: Any) -> bool:
    """Whether a step without noise moves a module, by no more than its clip norm allows."""
    module = nn.Sequential(nn.Linear(6, 4), norm or nn.Tanh(), nn.Linear(4, 3))
    module = ModuleValidator.fix(module) if fix else module
    before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    with training(module, records(8), lr=1.0, max_grad_norm=0.25, **options) as found:
        for batch in found.loader:
            found.step(batch, loss)
    moved = float((nn.utils.parameters_to_vector(module.parameters()) - before).norm())
    return 0.0 < moved <= 0.25 * 1.01


def counted(sampling: fc.Sampling) -> bool:
    """Whether two steps are in the ledger, and cost less where records are drawn."""
    book, steps = ledger(sampling=sampling), {"steps": 2, "noise_multiplier": 1.0}
    with training(net(), records(8), ledger=book, rate=sampling.event_rate, **steps) as found:
        for batch in found.loader:
            found.step(batch, loss)
    return book.rounds == 2


def continued(path: Path, change: Callable[[Path], Path]) -> bool:
    """Whether a run goes on with all it released, one event of it after its checkpoint; ``change`` names the file."""
    with contextlib.closing(ledger(path=path / "own")) as begun:
        rounds_of(begun, 1)
        state = begun.state_dict()
        begun.record(NOISE, round=2, participants=[1])
    with contextlib.closing(ledger(path=path / "other")) as another:
        rounds_of(another, 1)
    found = ledger()
    found.load_state_dict(state)
    with contextlib.closing(found):
        found.open(change(path))
        return found.releases == 2


def begun_anew(path: Path) -> bool:
    with contextlib.closing(ledger(path=path / "new")) as found:
        return rounds_of(found, 3) and found.releases == 3


def without_locks(path: Path | None) -> bool:
    with mock.patch.dict(sys.modules, {"fcntl": None}):
        return rounds_of(ledger(path=path), 1)


def capped(population: int, nodes: Any) -> bool:
    found = ledger(population=population, sampling=fc.Sampling("capped", cap=2))
    for number, node in enumerate(nodes, 1):
        found.record(NOISE, round=number, participants=[node])
    return len(found.participations) <= population


CORE = (
    row(
        "give two of --epsilon, --noise-multiplier and --releases; the third is computed",
        lambda: asked("--epsilon", "1"),
        lambda: (
            asked("--epsilon", "1", "--releases", "3")
            and asked("--epsilon", "1", "--noise-multiplier", "9")
            and asked("--noise-multiplier", "9", "--releases", "3")
        ),
    ),
    row(
        "add noise: {} or more",
        lambda: asked("--epsilon", "1", "--noise-multiplier", "0.5"),
        asked_with_the_figure_of_the_text,
    ),
    row(
        "a round without events cannot be accounted; leave it out",
        lambda: compose([NOISE, [], NOISE], 1e-5),
        lambda: compose([NOISE, NOISE], 1e-5).epsilon > compose([NOISE], 1e-5).epsilon,
    ),
    row(
        "which Skellam noise does not allow; use noise='discrete_gaussian'",
        lambda: joint_event(1.0, noise_of("skellam"), noise_of("skellam"), size=3),
        one_of_both,
    ),
    row(
        "a search over no pairs finds nothing; give at least one pair of data sets",
        lambda: farthest(of_mean, [], 1.0),
        lambda: farthest(of_mean, [([np.zeros(2)], [np.ones(2)])], 2.0**0.5).ok,
    ),
    row(
        "choose one of a finite distance above 0",
        lambda: project(np.zeros((4, 2)), np.zeros(2), np.zeros(2)),
        lambda: project(np.ones((4, 2)), np.zeros(2), np.ones(2))[0] == pytest.approx(2.0**0.5),
    ),
    row(
        "lower scale (now {}), rotate, tolerate fewer losses, or ask more clients",
        lambda: refining(),
        lambda: all(refining(**each) for each in ({"scale": 4096}, {"rotate": True}, {"tolerated": 0}, {"clients": 8})),
    ),
    row(
        "use reduction='none', or say how it is reduced",
        lambda: stepped(loss_reduction="none"),
        lambda: stepped(loss=each, loss_reduction="none") and stepped(loss_reduction="mean"),
    ),
    row(
        "Use GroupNorm or LayerNorm; opacus.validators.ModuleValidator.fix(module) returns a copy",
        lambda: stepped(nn.BatchNorm1d(4, affine=False), fix=True),
        lambda: stepped(nn.GroupNorm(2, 4)) and stepped(nn.LayerNorm(4)) and stepped(nn.BatchNorm1d(4), fix=True),
    ),
    row(
        "the state holds no count of private messages; start from init(layout)",
        lambda: decoded(fc.chain(PRIVATISE, fc.QSGD(7)), state={}),
        lambda: decoded(fc.chain(PRIVATISE, fc.QSGD(7))).any(),
    ),
    row(
        "use Sampling('poisson', rate=...), or Sampling('everyone')",
        lambda: counted(fc.Sampling("capped", cap=3)),
        lambda: counted(fc.Sampling("poisson", rate=0.5)) and counted(fc.Sampling("everyone")),
    ),
    row(
        "adjacency, the ledger accounts for {}; give both the same",
        lambda: stated("replace", "zero_out"),
        lambda: stated("replace", "replace") and stated("zero_out", "zero_out"),
    ),
)


FILES = (
    Row("lacks; run without a ledger file", lambda path: without_locks(path / "spent"), lambda _: without_locks(None)),
    Row(
        "is of another run; a run has one ledger. Put this run's own file there, or begin a new run",
        lambda path: continued(path, lambda path: path / "other"),
        lambda path: continued(path, lambda path: (path / "own").replace(path / "other")) and begun_anew(path),
    ),
    Row(
        "after the checkpoint would not be counted; put the run's file back",
        lambda path: continued(path, lambda path: path / "new"),
        lambda path: continued(path, lambda path: (path / "own").replace(path / "new")),
    ),
    row(
        "Declare the number of all that may ever take part, and let them keep their ids",
        lambda: capped(2, (1, 2, 3)),
        lambda: capped(3, (1, 2, 3)) and capped(2, (1, 2, 1, 2)),
    ),
)


def node(partitions: int = 4, task: Any = None, **options: Any) -> Any:
    """Return what a node has trained with a bound on each record and no noise, begun at zeros."""
    task = get_task("digits-zero", **(task or {}))
    model, data = task.model(0), task.client(partitions - 1, partitions)
    plan = replace(PLAN, noise_multiplier=0.0, rate=1.0, insecure=True)
    train_privately(Trainee("arrays", model, task, data, KEY, **options), plan, Context(1, 2, {}, RecordDict(), {}))
    return nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


def noisy(strategy: Any = None, plan: fc.DpSgdPlan = PLAN, over: Any = node_app, **config: Any) -> bool:
    """Whether a round of training with noise on one node moves the model."""
    start = to_record(to_arrays(get_task("digits-zero").model(0)))
    given = ConfigRecord({"task": "digits-zero", "clients": 1, "seed": 0})
    with fc.InProcessGrid(over, 1, node_config=config, seed=4) as grid:
        run = fc.RecordDp(strategy or quiet(), plan, records=2000)
        return bool(stack(fit(run, grid, start, 1, train_config=given, timeout=9.0).arrays).any())


def once(**config: Any) -> bool:
    """Whether a node with a budget for one training trains in one run, and in the next one no more."""
    plan = replace(PLAN, noise_multiplier=8.0)
    own = {OWN_BUDGET: compose([plan.event(65)] * plan.steps, plan.delta).epsilon + 1e-6, **config}
    return noisy(plan=plan, **own) and stopped("would cross", lambda: noisy(plan=plan, **own))


def stopped(text: str, call: Callable[[], Any]) -> bool:
    with pytest.raises(fc.NoUsableReply, match=text):
        call()
    return True


def limited(state_dir: Path | None = None, **config: Any) -> bool:
    """Whether a node that sends one message sends it, and in the next run no more."""

    def run() -> bool:
        app = client_app(
            [fc.local_privacy(LocalPolicy(noise_multiplier=0.5, releases=1), state_dir=state_dir), fc.compression()]
        )
        strategy = fc.local_dp(quiet(), Privatise(1e4, 0.5), fc.QSGD(7), population=NODES, delta=1e-3)
        with fc.InProcessGrid(app, NODES, node_config=config, seed=4) as grid:
            return bool(stack(fit(strategy, grid, model(), 1, timeout=9.0).arrays).any())

    return run() and stopped("has sent 1 private messages", run)


def in_node_config(path: Path, *words: str) -> bool:
    """Whether the command line of a node tells its app what the configuration of a SuperNode would."""
    command, _ = prepare([*GOOD, *words, str(path / "place")])
    return f"{words[-1].removeprefix('--')}='{path / 'place'}'" in command[-1]


NODES_OWN = (
    row(
        "not part of a record's gradient; use FedAvg (inner=fedavg)",
        lambda: noisy(quiet(FedProx, proximal_mu=0.1)),
        lambda: noisy(quiet()) and system("record-dp", inner="fedavg", noise_multiplier=2.0),
    ),
    row(
        "this partition holds no record; use fewer partitions, or min_examples >= 1",
        lambda: node(10, {"min_examples": 0, "partition": "dirichlet:0.01"}),
        lambda: (
            node(1, {"min_examples": 0, "partition": "dirichlet:0.01"}).any()
            and node(10, {"min_examples": 1, "partition": "dirichlet:0.01"}).any()
        ),
    ),
    row(
        "use weight_decay, which is added after the noise",
        lambda: node(task={"l2": 0.5}),
        lambda: 0 < np.linalg.norm(node(weight_decay=0.5)) < np.linalg.norm(node()),
    ),
    Row(
        "DIR (privacy-ledger='/absolute/file' or state-dir='/absolute/folder' in its node configuration)",
        lambda _: once(),
        lambda path: (
            once(**{LEDGER_FILE: str(path / "spent")})
            and once(**{STATE_FOLDER: str(path / "state")})
            and in_node_config(path, "--privacy-budget", "1", "--privacy-ledger")
        ),
    ),
    Row(
        "in a simulation write local_privacy(policy, state_dir=Path('/absolute/folder'))",
        lambda _: limited(),
        lambda path: (
            limited(path / "simulated")
            and limited(**{STATE_FOLDER: str(path / "state")})
            and in_node_config(path, "--state-dir")
        ),
    ),
)


def taught(**options: Any) -> bool:
    """Whether teachers move a generator."""
    return bool(taught_row(fit(datalens(**options), teachers(), images(), 1, timeout=9.0).arrays).any())


def generated(task: str) -> bool:
    """Whether a round moves the model of a task."""
    made, start = system("datalens", k=10, noise_multiplier=5.0), to_record(to_arrays(get_task(task).model(0)))
    made.declare(2)
    with fc.InProcessGrid(node_app, 2, seed=4) as grid:
        given = ConfigRecord({"task": task, "clients": 2, "seed": 0})
        return bool((stack(fit(made, grid, start, 1, train_config=given, timeout=9.0).arrays) != stack(start)).any())


SYSTEMS = (
    row(
        "the public number of clients is not known: give clients=N",
        lambda: datalens(clients=0).statement(),
        lambda: taught(clients=NODES) and datalens(clients=NODES).statement().population == NODES,
    ),
    row(
        "records of all clients", lambda: datalens(teachers=3, population=0), lambda: taught(teachers=3, population=180)
    ),
    row(
        "lower tolerated or threshold, or ask more clients",
        lambda: refining(scale=0, tolerated=2, threshold=2),
        lambda: all(
            refining(**{"scale": 0, "tolerated": 2, "threshold": 2, **each})
            for each in ({"tolerated": 1}, {"threshold": 1}, {"clients": 5})
        ),
    ),
    row(
        "shows the server single updates; make the strategy with DistributedDp(...)",
        lambda: fc.Compressed(NoisyMean(quiet(), fc.ShareSettings(clip=500.0, tolerated=1), **PROMISE), fc.QSGD(7)),
        lambda: trains(shares()),
    ),
    row(
        "has none; use DistributedDp(...)",
        lambda: NoisySum(codec=fc.FixedPoint(fc.RandomK(1.0), clip=0.5), threshold=1, contributors=4),
        lambda: trains(shares()),
    ),
    row(
        "use another codec, or accept that with pad=False",
        lambda: fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), Unmeasured(0.1)),
        lambda: (
            trains(fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, **PROMISE), fc.TopK(0.1)), PRIVATE)
            and trains(fc.Compressed(fc.DpFedAvg(quiet(), clip=1.0, pad=False, **PROMISE), Unmeasured(0.1)), PRIVATE)
        ),
    ),
    row("that has, such as 'digits-generator'", lambda: generated("digits"), lambda: generated("digits-generator")),
)


ROWS: tuple[Row, ...] = (*PRIVACY, *PRIVATE_PARTS, *LEDGERS, *CORE, *FILES, *NODES_OWN, *SYSTEMS)
