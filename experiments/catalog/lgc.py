"""LGC: how much an autoencoder of gradients loses against 8 bits at equal bytes, and whether training suffers."""

from __future__ import annotations

from typing import Final

from fedcomp.experiments.experiment import Curve, Experiment
from fedcomp.experiments.options import Config, Option
from fedcomp.experiments.studies import convolutions
from fedcomp.experiments.studies.lgc import learned, shared, study, train
from fedcomp.experiments.tables import of_codec
from fedcomp.rules import Int

_SHOWN: Final = (
    "dense",
    "LGC, ring, decoded memory",
    "LGC, server, decoded memory",
    "shared support, 8 bits",
    "the common node's top-k only, 8 bits",
)

_CLAIMS: Final = """
    # Values are divided by their root mean square; Adam.
    autoencoder | held-out error | <= 0.6 | goal: specification: .289, in one run
    latents, divided, SGD | held-out error | >= 0.9 | gate: specification: .996, which is no better than predicting
        zero; the third-party code trains it this way
    latents, as they are, SGD (third party's) | held-out error | >= 1.0 | gate: specification: 740; values are far
        smaller than what an untrained decoder returns
    autoencoder | error over that of 8 bits in the same bytes | >= 10.0 | gate: specification: three orders of magnitude
    decoders on a shared support | error over those trained on each node's own values | <= 1.0 | goal: derived: decoders
        cannot tell apart values at different coordinates
    server instance | error over that of zeros beside a node's innovation | <= 1.0 | goal: another node's latents
        contain information about this node's values
    autoencoder | error over that of 8 bits in the same bytes | <= 1.0 | goal: no worse than the strongest simple coding
    autoencoder | error over that of the largest quarter of the values | <= 1.0 | goal: no worse than keeping as many
        numbers unchanged (specification: .289 against .263)
    # A quarter of the floats; innovations and one node's latents.
    LGC, ring, decoded memory | bytes, last stage, over float32 on a shared support | <= 0.75 | gate: derived; both
        include dense tensors
    LGC, server | bytes, last stage, over float32 on a shared support | <= 0.75 | gate: derived; both include dense
        tensors
    LGC, ring, decoded memory | points lost | <= 1.0 | goal: abstract: .18 points with ResNet-101 on CIFAR-10
    LGC, server, decoded memory | points lost | <= 1.0 | goal: abstract: .18 points with ResNet-101 on CIFAR-10
"""

# The simple row that sends no more bytes in the last stage.
_RIVALS: Final = {
    "LGC, ring": "shared support, 8 bits",
    "LGC, ring, decoded memory": "shared support, 8 bits",
    "LGC, ring, decoded memory, latents in 8 bits": "shared support, 2 bits",
    "LGC, server": "the common node's top-k only, 8 bits",
    "LGC, server, decoded memory": "the common node's top-k only, 8 bits",
}


def rows(config: Config) -> dict[str, str]:
    """Return what the workers send. The stages of LGC follow from the number of steps."""
    lgc = f"lgc codec.rounds={config.rounds}"
    return {
        "dense": "codec codec.id=identity",
        "LGC, ring": lgc,
        "LGC, ring, decoded memory": f"{lgc} codec.ef=decoded",
        "LGC, ring, decoded memory, latents in 8 bits": f"{lgc} codec.ef=decoded codec.values=q8",
        "LGC, server": f"{lgc} codec.instance=server",
        "LGC, server, decoded memory": f"{lgc} codec.instance=server codec.ef=decoded",
        "shared support, float32 (ScaleCom)": "shared codec.values=float32",
        **{f"shared support, {bits} bits": f"shared codec.values=q{bits}" for bits in (8, 4, 2)},
        "the common node's top-k only, 8 bits": "shared codec.values=q8 codec.alone=true",
        "top-k of its own, 8 bits, + EF": (
            "codec codec.feedback=true codec.id=topk codec.density=0.05 codec.scope=layer codec.values=q8"
        ),
    }


EXPERIMENT = Experiment(
    **convolutions.PAGE,
    name="lgc",
    question="How much does an autoencoder of gradients lose against 8 bits with the same bytes, and does training "
    "suffer?",
    rows=rows,
    rivals={"lgc": learned, "shared": shared, "codec": of_codec},
    train=train,
    study=study,
    options={
        "seeds": 3,
        "workers": 1,
        # At 0.08 dense training of this network leaves its minimum again with one of three seeds (measured).
        "steps": "0.01,0.02,0.04",
        "trained": Option(300, Int(1), "steps whose gradients train the autoencoders in the comparison of codings"),
    },
    columns=("step size", "test, %", "±", "times fewer, all stages", "last step, bytes", "weights, bytes"),
    curves=[Curve(rows=_SHOWN)],
    claims=_CLAIMS
    + "".join(
        f"{row} | points lost against {rival} | <= 0.0 | goal: no worse than the simple rival in the same bytes\n"
        for row, rival in _RIVALS.items()
    ),
    answer=(
        "With as many bytes as the latents, 8 bits have "
        "{autoencoder | error over that of 8 bits in the same bytes:.0f} times less error than the autoencoder "
        "({autoencoder | held-out error:.3g} against {8 bits for each value | held-out error:.2g}). "
        + "; ".join(
            f"{row}: {{{row} | test, %:.1f}} %, {{{row} | times fewer, all stages:.0f}} times fewer bytes"
            for row in _SHOWN
        )
        + ". The saving of latents over float32 values makes up for the weights of an encoder after "
        "{rounds after which the weights of an encoder are paid back:.0f} rounds here."
    ),
    minutes=15.0,
    quick=("rounds=6", "seeds=1", "steps=0.02", "trained=3"),
    notes=(
        "Abrahamyan et al. (2022) send gradients as latents of a small autoencoder that is trained on the gradients "
        "of the first rounds. The first twentieth of the steps is dense, then values are sent until half of the "
        "steps, then latents. The weights of the autoencoder add to the bytes, once for each worker that needs "
        "them.\n\n"
        f"{convolutions.NOTES}\n\n"
        "The architecture, losses and published defaults are known from third-party code and recalled; "
        "normalisation, the position of innovations and the memory are derived. Only the abstract of the paper was "
        "available, and these figures say nothing about its large models."
    ),
)
