"""Chaos: does a compressed training survive if each of its processes is killed in turn?"""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.chaos import study
from fedcomp.rules import Int, Real

EXPERIMENT = Experiment(
    name="chaos",
    question="What becomes of a compressed training while everything it consists of is killed in turn?",
    # Runs are deployments of their own.
    study=study,
    repeats=False,
    options={
        "seeds": Option(
            3, Int(1), "runs with state folders, each with a schedule of its own; one without is run beside"
        ),
        "each": Option(
            3, Int(0, 8), "faults of each kind that nodes have: SIGKILL, pulled link, full disk, wrong clock"
        ),
        "server": Option(1, Int(0, 4), "faults of each kind that the server has: SIGKILL of app and of SuperLink"),
        "deadline": Option(
            30.0, Real(least=4.0, most=600.0), "seconds that a round waits for nodes that answered the one before"
        ),
        "pause": Option(
            1.0,
            Real(least=0.0, most=5.0),
            "seconds that a client waits before its state is written, so that faults find it",
        ),
        "workers": 4,
    },
    claims="""
        | rounds accounted for | >= {rounds} | gate: of the worst run: a run ends or is resumed
        | runs that did not end by themselves | <= 0 | gate: after its last round a run has completed
        | updates counted twice | <= 0 | gate: every update is in the model once, in a memory, or named
        with a state folder | nodes that lost mass | <= 0 | gate: the state is on the disk before the reply leaves
        # Float32 sums of sixty rounds may leave so much.
        with a state folder | largest share of a node's mass without a place | <= 1e-5 | gate: derived: float32 sums
        | wrong clocks that the node's log did not name | <= 0 | gate: Flower refuses such a node without a reason;
            ours says it, and comes back when the clock is set
        | processes left behind | <= 0 | gate: whatever is killed, all else ends
        without a state folder | nodes that lost mass | >= 1 | gate: memories die with their processes; else the judge
            sees nothing
    """,
    answer="{said}",
    rounds=60,
    clients=4,
    engines=("superlink",),
    minutes=12.0,
    quick=("rounds=11", "clients=3", "seeds=1", "each=1"),
    notes=(
        "Real deployments: fedcomp link with TLS, keys and a database, fedcomp node for each node, a network namespace "
        "and a small disk for each; Linux, root and iproute2. Top-k with error feedback, a perceptron on digits.\n\n"
        "The judge believes nobody: clients write down inner products of what they made before anything of it is kept "
        "or sent; these are compared with the model that came out, and with what lies in the state folders at the "
        "end. A server app that was killed is submitted again and goes on from its checkpoint. A wrong clock is 400 s "
        "behind, as that of a board without a battery after a power cut.\n\n"
        "What is lost without a state folder is estimated from what clients wrote down of their memories."
    ),
)
