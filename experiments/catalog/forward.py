"""Scalars instead of vectors: forward gradients against back-propagation, top-k and EDEN, for equal rounds and
bytes."""

from __future__ import annotations

from functools import partial
from typing import Final

from fedcomp.experiments.experiment import Curve, Experiment
from fedcomp.experiments.options import Option
from fedcomp.experiments.studies.forward import equal_bytes, train
from fedcomp.rules import Int

_RIVALS: Final = {
    "32 projections of a gradient": "projection max_steps=1 feedback=false codec.scale=unbiased",
    "top-k 1 %": "topk max_steps=1 codec.density=0.01",
    "top-k 1 %, both ways": "topk max_steps=1 codec.density=0.01 downlink=topk downlink.density=0.04",
    "EDEN, 1 bit": "eden max_steps=1 codec.bits=1",
    # The obvious rival: clients that train between two messages.
    "top-k 1 %, a pass of each client": "topk epochs=1 codec.density=0.01",
}

EXPERIMENT = Experiment(
    name="forward",
    question="How good are a few directional derivatives in place of a gradient, and how many bytes do they save?",
    task="digits",
    each="evaluate_every=1",
    rows={
        "back-propagation": "fedavg max_steps=1",
        "32 directions": "forward directions=32",
        "8 directions": "forward directions=8",
        "8 directions, the same for all": "forward directions=8 shared=true",
        "8 directions of each tensor": "forward directions=8 scope=layer",
        "1 direction": "forward directions=1",
        **_RIVALS,
    },
    tune={"lr": "steps"},
    tunes_without_messages=False,
    train=train,
    options={
        "seeds": 2,
        "workers": 2,
        "task.hidden": "32",
        "task.partition": "iid",
        "batch_size": 64,
        "steps": "0.1,0.3,1,3,10,30",
        "mnist_steps": Option(500, Int(1), "steps of each estimate on MNIST"),
        "mnist_hidden": Option(64, Int(1), "width of both hidden layers there"),
    },
    title="Directions, bytes and accuracy",
    columns=(
        "step size",
        "test, %",
        "±",
        "uplink bytes",
        "downlink bytes",
        "times fewer up",
        "times fewer both ways",
        "test, % in as many uplink bytes",
        "test, % in as many bytes both ways",
    ),
    caption=(
        "Test accuracy is the mean of the last 5 rounds and over seeds, ± half the range over seeds. Every row takes "
        "the step size from the grid that did best with exact gradients on a validation split; forward gradients "
        "scale it themselves. Bytes of payload are per client and round. The last two columns are the accuracies when "
        "a row has sent as many bytes as 32 directions do in all rounds. A row that never sends that many is measured "
        "at its end."
    ),
    curves=[Curve()],
    study=partial(equal_bytes, rivals=tuple(_RIVALS)),
    claims="""
        32 directions | points lost           | <= 2.0  | gate: measured for the specification: 1.2
        32 directions | times fewer up        | >= 50.0 | gate: 4 p bytes against 4 m and a frame's header;
            specification: 75 without a header
        32 directions | times fewer both ways | >= 20.0 | gate: derived: 4 m C bytes go down instead of the model
        8 directions, the same for all | points lost against 8 directions | >= 0.0 | gate: theory: with separate
            directions per client the variance falls with m C, not only with m
        | points ahead of the best rival in as many uplink bytes | >= 0.0 | goal: scalars beat sparse or few-bit
            gradients
        | points ahead of the best rival in as many bytes both ways | >= 0.0 | goal: scalars beat the same rivals
        | MNIST: points behind back-propagation, local losses, activities | <= 1.0 | goal: the abstract's forward
            gradients match back-propagation on MNIST
        | MNIST: points behind back-propagation, activities | <= 10.0 | gate: measured earlier with this experiment
        | MNIST: points behind back-propagation, weights, one direction for all | <= 1.0 | goal: as above, for weights
    """,
    answer=(
        "With 32 directions per client: {32 directions | times fewer up:.0f} times fewer bytes up and "
        "{32 directions | times fewer both ways:.0f} times fewer both ways, {32 directions | points lost:.1f} points "
        "lost in the same number of rounds; with the same uplink bytes "
        "{points ahead of the best rival in as many uplink bytes:+.1f} points against the best rival."
    ),
    rounds=180,
    clients=4,
    minutes=11.0,
    quick=("rounds=3", "clients=2", "seeds=1", "steps=0.3", "task.hidden=4", "mnist_steps=4", "mnist_hidden=4"),
    notes=(
        "The data are digits of 8x8 pixels, spread evenly over the clients; the model has 2410 parameters. Each "
        "client's message covers one batch, or in one row a pass over its data. Forward gradients measure how the "
        "loss of the batch changes along random directions of signs, without back-propagation. The server builds the "
        "estimate from these numbers and the directions, and sends the numbers of all clients down instead of the "
        "model.\n\n"
        "Rivals use back-propagation. They send the same number of projections (FedMPDD), the largest 1 % of the "
        "gradient with error feedback (the downlink is the model or compressed steps), or one bit per coordinate."
    ),
)
