"""Chaos: does a compressed training survive if each of its processes is killed in turn?"""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.chaos import study
from fedcomp.rules import Int, Real

EXPERIMENT = Experiment(
    name="chaos",
    question="What happens to a compressed training when each of its processes is killed in turn?",
    # Every run is a separate deployment.
    study=study,
    repeats=False,
    options={
        "seeds": Option(3, Int(1), "runs with state folders, each with its own schedule; one run without is added"),
        "each": Option(3, Int(0, 8), "faults of each kind on nodes: SIGKILL, lost link, full disk, wrong clock"),
        "server": Option(1, Int(0, 4), "faults of each kind on the server: SIGKILL of the app and of the SuperLink"),
        "deadline": Option(
            30.0, Real(least=4.0, most=600.0), "seconds that a round waits for nodes that answered the previous round"
        ),
        "pause": Option(
            1.0,
            Real(least=0.0, most=5.0),
            "seconds that a client waits before it writes its state, so that faults can hit that moment",
        ),
        "workers": 4,
    },
    claims="""
        | rounds accounted for | >= {rounds} | gate: in the worst run: every run ends or is resumed
        | runs that did not end by themselves | <= 0 | gate: a run completes after its last round
        | updates counted twice | <= 0 | gate: every update is in the model once, is in a memory, or is named as lost
        with a state folder | nodes that lost mass | <= 0 | gate: the state is on disk before the reply is sent
        # The rounding of float32 sums over sixty rounds may reach this size.
        with a state folder | largest share of a node's mass without a place | <= 1e-5 | gate: derived: float32 sums
        | wrong clocks that the node's log did not name | <= 0 | gate: Flower refuses such a node without a reason; our
            node logs the reason, and returns when the clock is right
        | processes left behind | <= 0 | gate: whichever process is killed, all others end too
        without a state folder | nodes that lost mass | >= 1 | gate: memories are lost with their processes; otherwise
            the check detects nothing
    """,
    answer="{said}",
    rounds=60,
    clients=4,
    engines=("superlink",),
    minutes=12.0,
    quick=("rounds=11", "clients=3", "seeds=1", "each=1"),
    notes=(
        "Each run is a real deployment: fedcomp link with TLS, keys and a database, and one fedcomp node for each "
        "node, each in its own network namespace with a small disk. This needs Linux, root and iproute2. A perceptron "
        "learns digits, with top-k and error feedback.\n\n"
        "The check does not rely on reports of the system itself. Clients log inner products of each update before "
        "they store or send any part of it. These are compared with the final model and with the contents of the "
        "state folders at the end. A server app that was killed is submitted again and continues from its checkpoint. "
        "A wrong clock is 400 s behind, as on a board without a battery after a power cut.\n\n"
        "The loss without a state folder is estimated from what clients logged about their memories."
    ),
)
