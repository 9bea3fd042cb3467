"""DP-SGD at equal epsilon: whole gradients, two kinds of votes, a random mask, low-rank products, and both combined."""

from __future__ import annotations

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.topagg_dpsgd import study
from fedcomp.rules import Flag, Real

EXPERIMENT = Experiment(
    name="topagg_dpsgd",
    question="How much accuracy does it cost at equal epsilon to train on votes, masks or low-rank products of "
    "gradients?",
    study=study,
    options={
        "seeds": 5,
        "workers": 2,
        "tune": Option(
            False, Flag(), "choose step sizes, k, rank and kept fraction again on the validation split, and use them"
        ),
        "secure": Option(False, Flag(), "draw noise and samples from the operating system instead of the seed"),
        "rate": Option(0.2, Real(above=0.0, most=1.0), "probability that a record is in a batch"),
        "delta": Option(1e-5, Real(above=0.0, most=1e-4), "delta of every epsilon"),
        "clip": Option(1.0, Real(above=0.0), "clip norm of a record's gradient; votes need none"),
        "task.hidden": "32",
    },
    claims="""
        | epsilon 1: the largest of all ledgers | <= 1 | gate: the calibration rounds the noise up
        | epsilon 3: the largest of all ledgers | <= 3 | gate: the calibration rounds the noise up
        | epsilon 10: the largest of all ledgers | <= 10 | gate: the calibration rounds the noise up
        | PRV over Rényi, the largest of all trainings | <= 1.0 | gate: theory: the tighter analysis does not exceed the
            looser one
        | releases recorded, over steps made | == 1 | gate: one event per step, also for batches without records
        | private trainings that have a statement | == 1 | gate: no epsilon without one
        | bytes of votes over 1.05 times the entropy bound plus header | <= 1.0 | gate: entropy of the support and
            the signs, in whole bytes
        DP-SGD, epsilon inf | accuracy | >= 0.9 | gate: measured earlier with other settings: 0.954
        # Accuracies are uncertain by the spread over seeds, and published figures are about other models.
        random mask, epsilon 1 | accuracy over DP-SGD's | >= 0 | goal: measured earlier on another model, two seeds,
            tuned on the test split: +0.015
        random mask, epsilon 3 | accuracy over DP-SGD's | >= 0 | goal: measured earlier on another model, two seeds,
            tuned on the test split: +0.013
        TopAgg, epsilon 1 & TopAgg, epsilon 3 & TopAgg, epsilon 10 | accuracy over DP-SGD's | >= 0 | goal: the abstract
            of the paper: better in most cases
        TopAgg, plain signs, epsilon 1 & TopAgg, plain signs, epsilon 3 & TopAgg, plain signs, epsilon 10 | accuracy \
            over DP-SGD's | >= 0 | goal: the abstract of the paper: better in most cases
    """,
    answer="Votes instead of whole gradients in DP-SGD, accuracy: "
    + ", ".join(
        f"{{TopAgg, epsilon {e} | accuracy:.1%}} (plain signs {{TopAgg, plain signs, epsilon {e} | accuracy:.1%}}) "
        f"against {{DP-SGD, epsilon {e} | accuracy:.1%}} at epsilon {e}"
        for e in (1, 3, 10)
    )
    + ".",
    rounds=100,
    clients=1,
    minutes=1.5,
    quick=("rounds=2", "seeds=1", "workers=1", "task.hidden=6", "rate=1.0", "delta=1e-4"),
    engines=("inprocess",),
    measures_privately=True,
    notes=(
        "The unit is a record: the trainer is trusted with the records, and the models are released. Records are "
        "drawn for a batch independently of each other, and the sum is divided by the expected batch.\n\n"
        "Step sizes, k, rank and the kept fraction of each method and epsilon were chosen on a fifth of the "
        "training records that was held out, with other seeds than those reported (--set tune=true does it "
        "again). That choice, and these figures themselves, are not covered by the epsilons.\n\n"
        "TopAgg inside DP-SGD is derived here: the published abstract names it, its algorithm and its table were "
        "not available. It loses here, and loses the more the smaller epsilon is: noise falls on all coordinates, "
        "while a vote for k of them says nothing about the others. Much of the loss is the votes' own randomness, "
        "which is added to the noise: plain signs, which a saturation as small as the published one amounts to, "
        'lose less. The case of both is the size of a message. "LSG" is low rank after published code with a '
        "sparse half derived here.\n\n"
        "The test split has 355 records: differences below one percent are within the spread over the seeds.\n\n"
        "Noise and samples come from the seed, so that the figures repeat, and every statement says so; "
        "secure=true takes them from the operating system."
    ),
)
