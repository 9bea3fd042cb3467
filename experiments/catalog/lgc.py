"""LGC: what an autoencoder of gradients loses, against 8 bits in the same bytes, and whether training notices."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Experiment
from fedcomp.experiments.options import TEXT, Option, numbers
from fedcomp.experiments.studies.lgc import study
from fedcomp.rules import Int

_SHOWN: Final = (
    "dense",
    "LGC, ring, decoded memory",
    "LGC, server, decoded memory",
    "shared support, 8 bits",
    "the common node's top-k only, 8 bits",
)

EXPERIMENT = Experiment(
    name="lgc",
    question="What does an autoencoder of gradients lose, against 8 bits in the same bytes, and does training notice?",
    # Every training has a step size of its own, which is found first.
    study=study,
    repeats=False,
    options={
        "seeds": 3,
        "workers": 1,
        "rates": Option(
            "0.01,0.02,0.04,0.08",
            TEXT,
            "step sizes; each row takes the one that does best on a validation split",
            check=numbers,
        ),
        "steps": Option(500, Int(5, 100_000), "steps of a training"),
        "trained": Option(300, Int(1), "steps on whose gradients autoencoders are trained where codings are compared"),
    },
    claims="""
        # Values divided by their root mean square, Adam.
        autoencoder | held-out error | <= 0.6 | gate: specification: .289
        latents, divided, SGD | held-out error | >= 0.9 | gate: specification: .996, which predicts zero; so the third
            party trains it
        latents, as they are, SGD (third party's) | held-out error | >= 1.0 | gate: specification: 740; values are far
            smaller than what an untrained decoder returns
        autoencoder | error over that of 8 bits in the same bytes | >= 10.0 | gate: specification: three orders of
            magnitude
        decoders on a shared support | error over those trained on each node's own values | <= 1.0 | goal: derived: what
            lies at other places cannot be told from one another
        server instance | error over that of zeros beside a node's innovation | <= 1.0 | goal: another node's latents
            say something of this one's values
        autoencoder | error over that of 8 bits in the same bytes | <= 1.0 | goal: no worse than the strongest simple
            coding
        autoencoder | error over that of the largest quarter of the values | <= 1.0 | goal: no worse than as many
            numbers kept as they are (specification: .289 against .263)
        # A quarter of the floats; innovations and one node's latents.
        LGC, ring, decoded memory | bytes, last stage, over float32 on a shared support | <= 0.75 | gate: derived; dense
            tensors are in both
        LGC, server | bytes, last stage, over float32 on a shared support | <= 0.75 | gate: derived; dense tensors are
            in both
        # Rivals send no more in the last stage.
        LGC, ring | points below shared support, 8 bits | <= 0.0 | goal: no worse than the simple rival in the same
            bytes
        LGC, ring, decoded memory | points below shared support, 8 bits | <= 0.0 | goal: no worse than the simple rival
            in the same bytes
        LGC, ring, decoded memory, latents in 8 bits | points below shared support, 2 bits | <= 0.0 | goal: no worse
            than the simple rival in the same bytes
        LGC, server | points below the common node's top-k only, 8 bits | <= 0.0 | goal: no worse than the simple rival
            in the same bytes
        LGC, server, decoded memory | points below the common node's top-k only, 8 bits | <= 0.0 | goal: no worse than
            the simple rival in the same bytes
        LGC, ring, decoded memory | points of accuracy lost | <= 1.0 | goal: abstract: .18 points with ResNet-101 on
            CIFAR-10
        LGC, server, decoded memory | points of accuracy lost | <= 1.0 | goal: abstract: .18 points with ResNet-101 on
            CIFAR-10
    """,
    answer=(
        "In the bytes of the latents 8 bits have {autoencoder | error over that of 8 bits in the same bytes:.0f} times "
        "less error than the autoencoder ({autoencoder | held-out error:.3g} against "
        "{8 bits for each value | held-out error:.2g}). "
        + "; ".join(
            f"{row}: {{{row} | test, %:.1f}} %, {{{row} | times fewer bytes:.0f}} times fewer bytes" for row in _SHOWN
        )
        + ". The weights of an encoder are paid back after "
        "{rounds after which the weights of an encoder are paid back:.0f} rounds of latents in place of float32 values "
        "here."
    ),
    rounds=1,
    clients=4,
    minutes=15.0,
    quick=("seeds=1", "steps=6", "rates=0.02", "trained=3"),
    notes=(
        "Abrahamyan et al. (2022) send gradients as latents of a small autoencoder that is trained on the gradients of "
        "the first rounds. Four workers train a network of three convolutions, 16, 32 and 64 filters, on the digits "
        "enlarged to 12 x 12, with momentum .9; the mean gradient takes a step. Training runs without messages, with "
        "the codec's real frames and a real training of the autoencoder; rounds over messages end in the same bits, as "
        "the tests show.\n\n"
        "The architecture, losses and published defaults are known from a third party's code and from memory; "
        "normalisation, the place of innovations and the memory are derived. What the paper reports was not available "
        "beyond its abstract: these figures say nothing of its large models. The test split has 359 images: one image "
        "makes .28 points."
    ),
)
