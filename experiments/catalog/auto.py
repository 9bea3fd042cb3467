"""Auto with and without memory: its gap to FedAvg, and other codecs at the same number of bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import TEXT, Option, numbers
from fedcomp.experiments.studies.auto import (
    ABOVE,
    BETTER,
    BYTES,
    COHORTS,
    DEFAULT,
    EARLY,
    LATE,
    NOISE,
    PLACES,
    QUARTER,
    TASKS,
    TUNABLE,
    WITHIN,
    random_part,
    rows,
    study,
    train,
)
from fedcomp.experiments.studies.readme import names

if TYPE_CHECKING:
    from fedcomp.experiments.tables import Found

MISSED: Final = {f"digits, {cohort}: {DEFAULT}" for cohort in ("5 of 50", "1 client", "FedAdam", "tuned")}
"""Rows whose tolerance from round 10 on is a goal: three seeds missed it. The tuned one does so because its step size
won by 0.2 points on the validation split and diverges with one seed."""

_OF_ALL: Final = f"""
    | {BYTES} | <= 1.0 | gate: the rival's density was chosen for it
    | {BETTER} | >= 0.5 | goal: feedback sends what was left out anyway, so that a better frame gains little
    | {NOISE.format(1)} | <= 0.4 | goal: EDEN, whose error is the same for every update, has 0.57
    | {NOISE.format(2)} | <= 0.04 | goal: EDEN has 0.13
"""

_OF_PLACES: Final = {
    EARLY: ("<= 1.0", "goal", "no memory that fills first, and no bias"),
    LATE: ("<= 1.0", "gate", "goal, half a point or 0.02 of loss"),
    ABOVE: ("<= 0.0", "gate", "goal: at equal bytes never worse than chance in few rounds"),
}


def claims(found: Found) -> str:
    """Return the claims: one for every place, then those about all tasks."""
    made = []
    for key in found.studied.quantities:
        if isinstance(key, tuple):
            row, name = key
            bound, kind, reason = _OF_PLACES[name]
            if row.endswith(QUARTER) or (row in MISSED and name == LATE):
                kind = "goal"
            made.append(f"{row} | {name} | {bound} | {kind}: {reason}")
    return "\n".join([*made, _OF_ALL])


EXPERIMENT = Experiment(
    name="auto",
    question="Does Auto keep up with FedAvg round by round, and is it better than rivals with the same number of bits?",
    rows=rows,
    each="evaluate_every=5",
    train=train,
    tunes_without_messages=False,
    rivals={"eden-part": random_part},
    last=2,
    options={
        "seeds": 3,
        "workers": 1,
        "tasks": Option(",".join(TASKS), TEXT, "what is learnt", check=lambda text: names(text, TASKS)),
        "cohorts": Option(
            ",".join(COHORTS), TEXT, "who else learns the first task", check=lambda text: names(text, COHORTS)
        ),
        "bits": Option("0.02,0.1,0.5,2", TEXT, "bits a value of further rows of the first task", check=numbers),
        "tuned": Option(
            "digits,mnist", TEXT, "tasks whose rows are also tuned", check=lambda text: names(text, TUNABLE)
        ),
        "steps": Option(
            "0.5,1,2",
            TEXT,
            "step sizes tried on a validation split, as multiples of the task's step size",
            check=numbers,
        ),
    },
    study=study,
    claims=claims,
    answer=(
        f"{DEFAULT} is within half a point or 0.02 of loss of FedAvg from round 10 on in {{{WITHIN.format(10)}}} of "
        f"{{{PLACES}}} places, from round 5 on in {{{WITHIN.format(5)}}}; with feedback at 0.1 bits it ends below "
        f"top-k q2 of as many bytes on {{{BETTER}:.0%}} of the tasks."
    ),
    rounds=30,
    clients=8,
    minutes=15.0,
    quick=(
        "rounds=2",
        "clients=2",
        "seeds=1",
        "tasks=digits",
        "cohorts=3 clients",
        "bits=0.1",
        "tuned=digits",
        "steps=1",
    ),
    notes=(
        "A user's own step is the one that did best for FedAvg on a validation split in 30 rounds, among steps a "
        "factor of two apart; on both models of text the next longer one diverged. A tolerance is half a point of "
        "accuracy or 0.02 of loss, whichever a row is nearer to, and the claim is about the worst of rounds 5, 10 and "
        "the last: means of seeds, against FedAvg with the same seeds. The noise beside top-k q2, which has as many "
        "bytes as feedback and up to a tenth more, is half the range over seeds of the difference.\n\n"
        "digits: an MLP of 85,002 parameters, ten batches of 16. mnist: a CNN of 114,314, four batches of 8; the "
        "first 12,000 training and 2,000 test images. cifar10-subset: a CNN of 62,006, eight batches of 16, momentum "
        "0.9. Every client holds its own mixture of the classes (Dirichlet, alpha 0.5). lstm (51,121 parameters) and "
        "transformer (63,233): the next character, four batches of 16 and 8, a speaker for each client, those with "
        "the most text. Without their files the embedded digits, enlarged, and drawn speakers stand in: same bytes, "
        "other figures.\n\n"
        "Not everything is trained with everything. Further bits, rivals and cohorts are tried on the first task; all "
        "rows are tuned on the first of the tuned tasks, and FedAvg, the default, feedback and top-k q2 on the "
        "others. --set tasks=mnist --set bits=1 --set tuned=mnist asks for others. Unbiased rows of fewer than 1.3/(2 "
        "N + 1) bits, 0.076 for 8 clients, are left out: Auto takes none.\n\n"
        "EDEN of a random part is trained without messages, so that its bytes on the wire are not known. Models go "
        "down whole but for rows that say otherwise, and there in the first round. FedPAQ is QSGD with 127 levels. N "
        "x NMSE is the squared error of the mean of ten encodings of one update over its square, times ten."
    ),
)
