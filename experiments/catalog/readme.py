"""README's first table: accuracy after few and many rounds, and bytes on the wire, for the lines it offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import TEXT, Option, numbers
from fedcomp.experiments.studies.readme import COHORTS, FEDAVG, TASKS, compare, lost, names, where
from fedcomp.rules import OneOf

if TYPE_CHECKING:
    from fedcomp.experiments.tables import Found

MISSED: Final = frozenset({("mnist", "sampled")})
"""Tasks and cohorts where the claim about the default is a goal: three seeds missed it."""


def _places(found: Found) -> dict[tuple[str, str], str]:
    settings = found.config.settings
    pairs = [(t, c) for t in names(str(settings["tasks"]), TASKS) for c in names(str(settings["cohorts"]), COHORTS)]
    return {pair: where(*pair, found.config) for pair in pairs}


def claims(found: Found) -> str:
    """Return one claim about the default for each task and cohort."""
    reason = "goal: the line that everybody tries first loses nothing, however long the training"
    return "\n".join(
        f"{place} | {lost(found.config)} | <= 0.5 | {'goal' if pair in MISSED else 'gate'}: {reason}"
        for pair, place in _places(found).items()
    )


def answer(found: Found) -> str:
    """Return the same in a sentence."""
    each = (
        f"{{{place} | {lost(found.config)}:.1f}} points at {{{place} | times fewer up:.0f}} times fewer bytes up "
        f"({place})"
        for place in _places(found).values()
    )
    return f"The default loses at most {', '.join(each)}."


EXPERIMENT = Experiment(
    name="readme",
    question="Which line is the right first one, in few rounds and in many, with all clients and with a few of them?",
    # Every task and cohort has a step size of its own, which is found first.
    study=compare,
    options={
        "seeds": 3,
        "tasks": Option(",".join(TASKS), TEXT, "what is learnt", check=lambda text: names(text, TASKS)),
        "cohorts": Option(",".join(COHORTS), TEXT, "who trains in a round", check=lambda text: names(text, COHORTS)),
        "steps": Option(
            "0.5,1,2,4", TEXT, "step sizes tried on a validation split, in multiples of the task's", check=numbers
        ),
        "tune": Option(FEDAVG, OneOf(FEDAVG, "every row"), "whose step size is looked for; FedAvg's is every row's"),
        "workers": 1,
    },
    repeats=False,
    claims=claims,
    answer=answer,
    rounds=40,
    clients=10,
    minutes=15.0,
    quick=("rounds=4", "clients=2", "seeds=1", "steps=1", "tasks=digits"),
    notes=(
        "Three lines by situation. Safe: EDEN rotates the update at random and sends one bit a coordinate, unbiased, "
        "without memory. Both ways: the server does the same, scaled for the least squared error. Smaller: the largest "
        "3 % of the changes in two bits a value, with error feedback; the server's 5 % in four bits. bfloat16 both "
        "ways and QSGD are what a sceptic would name. float16 is refused as a downlink: it can overflow.\n\n"
        "All clients: each of ten holds its own mixture of the classes (Dirichlet, alpha 0.5), and all train in every "
        "round. Sampled: each of thirty holds two pieces of the examples sorted by label, and ten train in a round; a "
        "client that is asked in a third of the rounds delivers late what it remembers.\n\n"
        "digits: 1,797 images, an MLP of 85,002 parameters, one pass in batches of 64. mnist: an MLP of 79,510, five "
        "batches of 32. cifar10-subset: an MLP of 98,666, five batches of 32. "
        "Without the files of the last two the embedded digits stand in, enlarged: same bytes, other accuracies."
    ),
)
