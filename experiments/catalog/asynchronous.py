"""Clients of different speeds: does it pay to step as soon as some updates have arrived, and which are left out?"""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.asynchronous import study
from fedcomp.rules import Flag, Int, Real

EXPERIMENT = Experiment(
    name="async",
    question="When clients have very different speeds, does it pay not to wait for the slow ones, and who is left out?",
    study=study,
    repeats=False,
    options={
        "seeds": 3,
        "workers": 2,
        "task.partition": "dirichlet:0.3",
        "steps": "0.1,0.3,0.6,1.2",
        "seconds": Option(60.0, Real(above=0.0), "simulated seconds of a training; a message takes one on average"),
        "variation": Option(1.0, Real(least=0.0, most=5.0), "coefficient of variation of the clients' paces"),
        "target": Option(93.0, Real(above=0.0, most=100.0), "accuracy to reach, %"),
        "deployment": Option(True, Flag(), "time three rows in a real deployment, too: some 100 s"),
        "deployed_steps": Option(6, Int(2), "rounds there, of four clients each"),
    },
    claims="""
        buffered | seconds to the target over synchronous rounds | <= 0.7 | gate: chosen: the server does not wait for
            the slowest
        buffered | seconds to the target over rounds with the best deadline | <= 1.0 | goal: the strongest simple rival
        buffered | seconds to the target over single updates | <= 1.0 | goal: of this experiment
        buffered, top-k 5 % + EF | uplink bytes to the target over buffered | <= 0.2 | gate: chosen: works with any
            codec and its memory
        synchronous | evenness of the clients' updates | >= 0.999 | gate: all clients take part
        buffered | evenness over that of rounds with the best deadline | >= 1.0 | goal: slow clients are late, but not
            left out
        buffered | seconds to the common loss over synchronous rounds, deployed | <= 0.9 | goal: of this experiment
    """,
    answer=(
        "Steps of buffered updates reach {target, %:g} % after {buffered | seconds to the target} simulated seconds, "
        "synchronous rounds after {synchronous | seconds to the target}, rounds with the best deadline after "
        "{best deadline | seconds to the target}; the slowest quarter of the clients contributes "
        "{buffered | slowest quarter's share, %:.0f}, {synchronous | slowest quarter's share, %:.0f} and "
        "{best deadline | slowest quarter's share, %:.0f} % of the updates."
    ),
    rounds=1,
    clients=20,
    minutes=4.0,
    quick=("clients=4", "seeds=1", "steps=0.3", "seconds=4", "deployment=false"),
    notes=(
        "A training ends after a number of seconds on the simulated clock, so the number of rounds has no effect. The "
        "server takes no time on that clock.\n\n"
        "A buffered step weighs its updates by examples, as FedAvg does, and by 1/sqrt(1 + age). An update that is "
        "refused for its age goes back into its client's memory."
    ),
)
