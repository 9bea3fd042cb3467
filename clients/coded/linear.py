"""The client half of coded gradient descent: the app supplies the rows that the node owns.

**Privacy.** The device sends its raw training data to other devices, or through the server, and its labels to the
server: use it inside one trust domain only; see :mod:`fedcomp.coding.datacode`, which also says what of this is our
reconstruction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from flwr.app import Context, Message

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.programs import Brought, bringing
from fedcomp.program import Me
from fedcomp.systems.coded.linear import CodedLinear, LinearRows

RowsOf = Callable[[Message, Context, int], LinearRows]
"""``rows(message, context, partitions)``: the examples of this device's own partition, of so many."""


def linear_device(rows: RowsOf) -> ClientHalf:
    """Return the client half of coded gradient descent, which supplies the node's rows.

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


@dataclass
class _Device:
    """A device in one message: :class:`fedcomp.systems.coded.linear.Brings`."""

    given: RowsOf
    msg: Message
    context: Context

    def rows(self, me: Me, partitions: int) -> LinearRows:
        return self.given(self.msg, self.context, partitions)
