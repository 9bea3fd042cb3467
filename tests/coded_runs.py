"""What the tests of coded rounds share: the toy app behind both mods, one run of it, and ways to lose clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result, Strategy
from toy import client_app, model

from fedcomp.clients.coded.mod import coded
from fedcomp.clients.compressed import compression
from fedcomp.coding.transport import DeliveryFailed, Parcel, SpoolTransport
from fedcomp.flower.faults import Delivery
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.ledger import TrafficLedger
from fedcomp.flower.metered import MeteredGrid
from fedcomp.flower.rounds import fit

Plan = Callable[[Delivery], Any]


def coded_app(**options: Any) -> ClientApp:
    """Return the toy app with both mods."""
    return client_app([coded(**options), compression()])


def run(
    strategy: Strategy,
    nodes: int = 10,
    *,
    rounds: int = 1,
    fault: Plan | None = None,
    app: Callable[[Message, Context], Message] | None = None,
    initial: ArrayRecord | None = None,
    timeout: float = 9.0,
    **engine: Any,
) -> tuple[Result, MeteredGrid]:
    """Run ``strategy`` in process."""
    with InProcessGrid(app or coded_app(), nodes, **{"seed": 3, "fault": fault, **engine}) as inner:
        grid = MeteredGrid(inner, TrafficLedger())
        return fit(strategy, grid, initial or model(), rounds, timeout=timeout), grid


def bits(result: Result) -> bytes:
    """Return the final model's bytes."""
    return b"".join(np.ascontiguousarray(array.numpy()).tobytes() for array in result.arrays.values())


def after_sharing(lost: Iterable[int], *, hub_put: bool = True, rounds: Iterable[int] | None = None) -> Plan:
    """Lose the given partitions once they have shared: they answer no query of a round any more, the hello apart.

    ``hub_put`` leaves them there until the server has put the others' shards into them.
    """
    gone, when = set(lost), None if rounds is None else set(rounds)

    def plan(delivery: Delivery) -> str | None:
        kind = delivery.message_type
        if delivery.partition not in gone or (when is not None and delivery.round not in when):
            return None
        if kind == "query.coded_collect" or (kind == "query.coded_put" and not hub_put):
            return "silent"
        return None

    return plan


def break_links(patch: pytest.MonkeyPatch) -> None:
    """Let no simulated link reach every third relay; of some parcels only the acknowledgement is lost."""
    send = SpoolTransport.send

    def broken(self: SpoolTransport, address: str, parcel: Parcel, partition: int | None = None) -> int:
        if parcel.destination % 3:
            return send(self, address, parcel, partition)
        raise DeliveryFailed("the link broke", send(self, address, parcel, partition) if parcel.source % 2 else 0)

    patch.setattr(SpoolTransport, "send", broken)


def before_sharing(lost: Iterable[int]) -> Plan:
    """Lose the given partitions before they train."""
    gone = set(lost)

    def plan(delivery: Delivery) -> str | None:
        return "silent" if delivery.partition in gone and delivery.message_type != "query.coded_hello" else None

    return plan


def either(*plans: Plan) -> Plan:
    """Return the first fault any of ``plans`` has."""

    def plan(delivery: Delivery) -> Any:
        return next((fault for fault in (each(delivery) for each in plans) if fault is not None), None)

    return plan
