"""What a client brings for coded gradient descent: the rows it owns, and its own links to other devices.

**Privacy.** The device sends its raw training data to other devices, or through the server, and its labels to the
server: use it inside one trust domain only; see :mod:`fedcomp.coding.datacode`, which also says what of this is our
reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from flwr.app import Context, Message

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.peers import peer_link
from fedcomp.clients.programs import Brought, bringing
from fedcomp.coding.transport import MAX_STORE_BYTES, Parcel, PeerTransport, SpoolRoot, deliver
from fedcomp.flower.logs import log
from fedcomp.program import Me
from fedcomp.systems.coded.linear import CodedLinear, LinearRows

_PARTITION_KIND: Final = 0
_WAIT_SECONDS: Final = 5.0

RowsOf = Callable[[Message, Context, int], LinearRows]
"""``rows(message, context, partitions)``: the examples of this device's own partition, of so many."""


def linear_device(rows: RowsOf) -> ClientHalf:
    """Return the half that brings rows to coded gradient descent.

    Parameters
    ----------
    rows : callable
        Called where a device owns a partition. The node configuration's ``partition-id`` is the number of the device;
        devices with numbers below ``partitions`` own that partition, the others own nothing.

    Examples
    --------
    >>> import numpy as np
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> x, y = np.eye(4), np.array([0.0, 1.0, 0.0, 1.0])
    >>> app = client(ClientApp(), linear_device(lambda msg, context, partitions: LinearRows(x, y, "logistic")))
    """
    return bringing("linear", CodedLinear.ID, partial(_brought, rows))


def _brought(rows: RowsOf, msg: Message, context: Context) -> Brought:
    return Brought(_Device(rows, msg, context))


class _Device:
    """A device in one message: :class:`fedcomp.systems.coded.linear.Brings`."""

    def __init__(self, rows: RowsOf, msg: Message, context: Context) -> None:
        self._rows, self._msg, self._context = rows, msg, context

    def rows(self, me: Me, partitions: int) -> LinearRows:
        return self._rows(self._msg, self._context, partitions)

    def links(self, me: Me, spool: str) -> _Links:
        return _Links(peer_link(self._context, me.node, spool, MAX_STORE_BYTES), me.node, spool)


class _Links:
    """:class:`fedcomp.systems.coded.linear.Links`: by the node's address, or simulated on the server's machine."""

    def __init__(self, link: PeerTransport, device: int, spool: str) -> None:
        self._link, self._device, self._spool = link, device, spool

    @property
    def address(self) -> str:
        # Where simulated links lead the server knows; what it is told would be believed on every machine.
        return "" if self._link.address.startswith("spool:") else self._link.address

    def hand(self, plan: bytes, to: Sequence[int], addresses: Sequence[str], packed: bytes) -> tuple[int, ...]:
        # The plan's id stands for the run, and the set-up belongs to no round.
        parcels = [Parcel(plan, 0, _PARTITION_KIND, self._device, i, packed) for i in to]
        where = [own or SpoolRoot(Path(self._spool)).address(i) for i, own in zip(to, addresses, strict=True)]
        deliveries = deliver(self._link, list(zip(where, parcels, strict=True)))
        failed = [str(delivery.error) for delivery in deliveries if delivery.error is not None]
        if failed:
            device, count = self._device, len(failed)
            log.warning("device %d could not hand over its partition %d times: %s", device, count, failed[0])
        return tuple(delivery.handed_over for delivery in deliveries)

    def come(self, plan: bytes, count: int) -> list[bytes]:
        # The owners have answered that they sent theirs; what is not here by now may be a moment late, or is lost.
        return [parcel.body for parcel in self._link.recv(plan, 0, _WAIT_SECONDS, expect=count)]

    def forget(self, plan: bytes) -> None:
        self._link.store.take(plan, 0)
