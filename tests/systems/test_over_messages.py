"""Every system over Flower's messages is what the driver in memory makes of it, bit for bit.

What the contract says of a system on that driver therefore holds for the server and its clients, too: nothing is lost
under faults; supports, leaders, bases and their turns; dense rounds; step sizes.
"""

from __future__ import annotations

import pytest
from beside_product import assert_equal, faults, product, program, some
from registry import ENTRIES
from toys import Passing

from fedcomp.clients.compressed import compression
from fedcomp.codecs import LGC, GradiVeQ, PowerSGD, ScaleCom
from fedcomp.program import Mean, System
from fedcomp.strategies.cohort import Cohort, CohortSettings
from fedcomp.strategies.server import Server
from fedcomp.systems.factors import FactorSharing
from fedcomp.systems.gradiveq import FittedBasis
from fedcomp.systems.lgc import LearnedGradients
from fedcomp.systems.power_sgd import SharedBasis
from fedcomp.systems.shared_support import SharedSupport

PHASES = {"sampling": 3, "compression": 3}

MORE: dict[str, System] = {
    "shared-support, few bits": SharedSupport(ScaleCom(0.05, beta=0.5, values="q8"), server_lr=0.5),
    "shared-support, no memory": SharedSupport(ScaleCom(0.05, memory=False)),
    "shared-support, guarded": SharedSupport(ScaleCom(0.05, selector="chunk", norm_guard=1.0), 2),
    "power-sgd, few bits": SharedBasis(PowerSGD(2, values="q8", norm_guard=1.0), server_lr=0.5),
    "power-sgd, bases drawn": SharedBasis(PowerSGD(2, warm_start=False), 2),
    "power-sgd, two exchanges, aggregated": SharedBasis(PowerSGD(2, form="two-exchange", memory="aggregated"), 1),
    "power-sgd, two exchanges, guarded": SharedBasis(PowerSGD(2, form="two-exchange", values="q8", norm_guard=1.0)),
    "gradiveq, centred": FittedBasis(GradiVeQ(width=47, loss=0.3, center=True, memory=True), **PHASES),
    "gradiveq, a basis a slice": FittedBasis(GradiVeQ(width=47, loss=0.3, basis="per_slice", most=2), **PHASES),
    "gradiveq, guarded": FittedBasis(
        GradiVeQ(width=47, loss=0.3, basis="shared_first", order="FDHW", norm_guard=2.0, memory=True), **PHASES
    ),
    "gradiveq, few bits": FittedBasis(
        GradiVeQ(width=47, loss=0.3, values="q8"), server_lr=0.5, warmup_rounds=1, **PHASES
    ),
    "gradiveq, drifting": FittedBasis(GradiVeQ(width=47, loss=0.3, refresh_tol=1e-6), **PHASES),
    "gradiveq, no slice": FittedBasis(GradiVeQ(width=5000), **PHASES),
    "lgc, two decoders": LearnedGradients(
        LGC(0.05, ef="decoded", raw=0), 1, 2, training={"optimizer": "sgd", "lr": 0.01, "passes": 2, "decoders": 2}
    ),
    "lgc, few bits": LearnedGradients(LGC(0.05, values="q8", selector="chunk", norm_guard=1.0, raw=0), 1, 1),
    "lgc, a leader that stays": LearnedGradients(
        LGC(0.05, instance="server", values="bf16", beta=0.5, raw=0), 1, 2, server_lr=0.5, common="first"
    ),
}
"""Options that change what travels or is remembered, beside those of the registry."""

# What needs more than a trained model brings an app of its own: test_forward_program.py and test_factors_program.py.
# Boxes are sealed at random, and replies packed by each driver in its own way: what posts is in
# test_posts_over_messages.py.
PLAIN = {
    name: entry
    for name, entry in ENTRIES.items()
    # What is for private sums alone is compared where these are.
    if entry.data is None and Mean in entry.system.RULES and not isinstance(entry.system, FactorSharing)
    if not entry.system.KEYS
}
QUICK = [name for name, entry in PLAIN.items() if not entry.another] + ["lgc-server"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "rounds"),
    [
        *(pytest.param(PLAIN[name].system, 8, id=name) for name in QUICK),
        *(pytest.param(e.system, 16, id=f"{name}, longer", marks=pytest.mark.long) for name, e in PLAIN.items()),
        *(pytest.param(system, 16, id=name, marks=pytest.mark.long) for name, system in MORE.items()),
    ],
)
def test_it_is_the_driver_in_memory_bit_for_bit(system: System, rounds: int) -> None:
    """Frames that come and go, models, memories, metrics: absent nodes, messages lost or doubled in any exchange.
    Clients evaluate in between, which changes nothing; what they train and evaluate is the server's model."""
    how = {"fault": faults(0.15), "present": some(4, rounds)}
    who = Cohort(CohortSettings(fraction_evaluate=1.0), 0)
    server = Server(system, who, downlink=system.codec if system.makes_steps else None)
    kinds = ("query", "train") if isinstance(system, Passing) else ("train", "query")
    new, _ = program(system, 4, rounds, **how, kinds=kinds)
    assert_equal(product(server, compression(), 4, rounds, **how), new)
