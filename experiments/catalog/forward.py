"""Scalars instead of vectors: forward gradients against back-propagation, top-k and EDEN at equal rounds and bytes."""

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
    # What a sceptic would name: clients that train between two messages.
    "top-k 1 %, a pass of each client": "topk epochs=1 codec.density=0.01",
}

EXPERIMENT = Experiment(
    name="forward",
    question="What do a few directional derivatives buy in place of a gradient?",
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
        "the step size of the grid that did best on a validation split, of exact gradients; forward gradients scale it "
        "by themselves. Bytes of payload are per client and round. The last two columns are accuracies when a row has "
        "sent as many bytes as 32 directions do in all rounds; a row that has not by the end is taken at its end."
    ),
    curves=[Curve()],
    study=partial(equal_bytes, rivals=tuple(_RIVALS)),
    claims="""
        32 directions | points lost           | <= 2.0  | gate: spec: 1.2, measured
        32 directions | times fewer up        | >= 50.0 | gate: 4 p bytes against 4 m, and a frame's head; spec: 75
            without one
        32 directions | times fewer both ways | >= 20.0 | gate: derived: 4 m C bytes go down in place of the model
        8 directions, the same for all | points lost against 8 directions | >= 0.0 | gate: theory: directions of each
            client's own have a variance over m C and not over m
        | points ahead of the best rival in as many uplink bytes | >= 0.0 | goal: scalars against sparse or few-bit
            gradients
        | points ahead of the best rival in as many bytes both ways | >= 0.0 | goal: scalars against the same
        | MNIST: points behind back-propagation, local losses, activities | <= 1.0 | goal: the abstract's forward
            gradients match back-propagation on MNIST
        | MNIST: points behind back-propagation, activities | <= 10.0 | gate: measured here before
        | MNIST: points behind back-propagation, weights, one direction for all | <= 1.0 | goal: the same, of weights
    """,
    answer=(
        "32 directions of each client: {32 directions | times fewer up:.0f} times fewer bytes up and "
        "{32 directions | times fewer both ways:.0f} times fewer both ways, {32 directions | points lost:.1f} points "
        "lost in as many rounds; in as many uplink bytes "
        "{points ahead of the best rival in as many uplink bytes:+.1f} points against the best rival."
    ),
    rounds=180,
    clients=4,
    minutes=5.0,
    quick=("rounds=3", "clients=2", "seeds=1", "steps=0.3", "task.hidden=4", "mnist_steps=4", "mnist_hidden=4"),
    notes=(
        "Digits of 8x8 pixels, spread evenly over the clients, a model of 2410 parameters; every client's message is "
        "about one batch, or in one row about a pass over its data. Forward gradients measure how the loss of the "
        "batch changes along random directions of signs, without back-propagation; the server makes the estimate of "
        "these numbers and the directions, and sends the numbers of all clients down in place of the model.\n\n"
        "Rivals back-propagate and send the same number of projections (FedMPDD), the largest hundredth of the "
        "gradient with error feedback, with the model or with compressed steps down, or one bit per coordinate."
    ),
)
