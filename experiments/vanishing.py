"""Runs of whole systems with devices that vanish inside a round: real messages and shards, equal failures for all.

A world says when devices can be reached and how fast their links are; :func:`live` runs a system in it, :func:`relive`
runs the plain pair again with exactly the clients whose updates another run had in its sums.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedcomp.coding.transport import Parcel, SpoolRoot
from fedcomp.errors import StateError
from fedcomp.experiments.findings import mean
from fedcomp.experiments.spec import RunResult, RunSpec
from fedcomp.timing.dropout import Situation, World

if TYPE_CHECKING:
    # Listing the experiments needs no Flower: it is imported when one is run.
    from fedcomp.flower.faults import Fault, Kind
    from fedcomp.flower.vanishing import RoundTrace, Trained


@dataclass(frozen=True)
class Life:
    """A run in a world.

    Attributes
    ----------
    result : RunResult
    log : mapping of int to RoundTrace
    included : mapping of int to tuple of int
        By round: the partitions whose updates are in the sum.
    """

    result: RunResult
    log: Mapping[int, RoundTrace]
    included: Mapping[int, tuple[int, ...]]

    @property
    def fraction(self) -> float:
        """Share of all clients of all rounds whose update is in a sum."""
        return mean(len(included) / self.result.spec.clients for included in self.included.values())

    @property
    def last(self) -> float:
        """Mean simulated seconds until the last reply of a round came."""
        return mean(self.log[r].last for r in self.included)


def live(spec: RunSpec, world: World, *, chunk: int = 0) -> Life:
    """Run ``spec`` in ``world``; uploads keep what arrived of them in pieces of ``chunk`` bytes, 0 for not at all."""
    from fedcomp.clients.app import app as client_app
    from fedcomp.experiments.serve import serve
    from fedcomp.experiments.systems import get_system
    from fedcomp.flower.grid import InProcessGrid
    from fedcomp.flower.vanishing import VanishingGrid

    with (
        tempfile.TemporaryDirectory(prefix="fedcomp-peers-") as folder,
        InProcessGrid(client_app, spec.clients, seed=spec.seed) as engine,
    ):
        linked = get_system(spec.system).resolve(spec.settings).get("transport") == "peers"
        grid = VanishingGrid(
            engine,
            world.failures,
            world.compute,
            server=world.server,
            peer=world.peer,
            deadlines=(world.share_by, world.end),
            chunk=chunk,
            shared=partial(share, Path(folder)) if linked else None,
        )
        # The folder is made here and is part of no specification: the result is given back with the one that was asked
        # for.
        result = serve(replace(spec, settings={**spec.settings, "spool": folder}) if linked else spec, grid)
    rounds = range(1, spec.rounds + 1)
    included = {
        # A system without shards has no such figure: who answered in time is in the sum.
        r: tuple(result.rounds[r].metrics.get("coded.partitions", sorted(grid.log[r].answered)))
        for r in rounds
    }
    return Life(replace(result, spec=spec), grid.log, included)


def relive(spec: RunSpec, life: Life) -> RunResult:
    """Run ``spec``, a system without coding, with the clients that trained in ``life`` and the updates in its sums."""
    from fedcomp.experiments.engines import inprocess
    from fedcomp.flower.faults import ScriptedFaults

    script: dict[tuple[int, int], Fault | Kind] = {}
    for r, included in life.included.items():
        for client in range(spec.clients):
            if client not in life.log[r].trained:
                # It did not train, so that its memory must not move here either.
                script[r, client] = "silent"
            elif client not in included:
                # Trained, but not in the sum: only the reply is lost.
                script[r, client] = "lost_reply"
    return inprocess.run(spec, fault=ScriptedFaults(script))


def share(folder: Path, situation: Situation, trained: Trained) -> dict[int, float]:
    """Take the shards out of the peers' spools that a vanishing sender or holder kept from landing; return when each
    client had sent all of its own (:data:`fedcomp.flower.vanishing.Shared`).

    Raises
    ------
    StateError
        When a message asks for nothing.
    """
    from fedcomp.flower.asks import find_ask

    # The root of the spools of one run, which it makes when it begins.
    root, clients = SpoolRoot(folder), len(situation.presence)
    held: dict[int, dict[int, Parcel]] = {}
    left: dict[int, float] = {}
    for client, (start, message) in trained.items():
        ask = find_ask(message.content)
        if ask is None:
            raise StateError(f"client {client} was sent no ask of a system")
        # To those that follow it, in order (:meth:`fedcomp.coding.relay.RelayPlan.holders`).
        relays = [(client + 1 + i) % clients for i in range(clients)]
        for relay in set(relays) - set(held):
            held[relay] = {parcel.source: parcel for parcel in root.spool(relay).list(ask.session, ask.number)}
        sent = [(relay, held[relay][client]) for relay in relays if client in held[relay]]
        landed, left[client] = situation.share(client, start, [(relay, len(parcel)) for relay, parcel in sent])
        for (relay, parcel), at in zip(sent, landed, strict=True):
            if at > situation.share_by:
                root.spool(relay).remove(parcel)
    return left
