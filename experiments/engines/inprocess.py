"""The default engine: server and clients in one process, in sequence, with every message serialised.

Its checkpoints hold the clients' states, too, and it is the only engine with a virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedcomp.clients.app import app as client_app
from fedcomp.experiments.serve import serve
from fedcomp.experiments.spec import RoundRecord, RunResult, RunSpec
from fedcomp.experiments.systems import get_system
from fedcomp.flower.faults import FaultPlan
from fedcomp.flower.grid import InProcessGrid
from fedcomp.timing import parse_link


def run(
    spec: RunSpec,
    *,
    on_round: Callable[[RoundRecord], object] | None = None,
    checkpoint: Path | None = None,
    checkpoint_every: int | None = None,
    privacy: Path | None = None,
    client_states: Path | None = None,
    fault: FaultPlan | None = None,
) -> RunResult:
    """Run ``spec`` in this process, with faults where a plan asks for them. See
    :func:`fedcomp.experiments.engines.run`."""
    link = str(get_system(spec.system).resolve(spec.settings)["link"])
    links = parse_link(link) if link else None
    if client_states is not None:
        client_states.mkdir(parents=True, exist_ok=True)
    grid = InProcessGrid(client_app, spec.clients, seed=spec.seed, links=links, states=client_states, fault=fault)
    with grid:
        return serve(
            spec, grid, on_round=on_round, checkpoint=checkpoint, checkpoint_every=checkpoint_every, privacy=privacy
        )
