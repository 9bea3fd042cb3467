"""What an app provides for a DataLens run: teachers that learn on the node's records
(:mod:`fedcomp.systems.private.datalens`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flwr.app import Context, Message

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.messages import require_partition
from fedcomp.clients.programs import Brought, bringing
from fedcomp.flower.payload import models
from fedcomp.flower.records import to_arrays
from fedcomp.program import Me
from fedcomp.systems.private.datalens import Arrays, NodeTeachers, Teachers

TeachersOf = Callable[[Message, Context, Teachers], NodeTeachers]
"""``ensemble(message, context, request)``: called only where a request is not answered from memory."""


def datalens_teachers(ensemble: TeachersOf) -> ClientHalf:
    """Return the half that provides teachers for a DataLens run, in addition to
    :func:`~fedcomp.clients.compressed.compression`.

    Errors while teachers are loaded, trained and asked to vote stay on the node, except errors about settings
    (:data:`fedcomp.clients.private.mod.ABOUT_SETTINGS`).

    Parameters
    ----------
    ensemble : callable
        Returns this node's teachers. In a deployment it must not rely on state between calls.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> from fedcomp.rng import Key
    >>> from fedcomp.tasks import get_task
    >>> from fedcomp.tasks.gan import Adam
    >>> task = get_task("digits-generator")
    >>> def teachers(message, context, request):
    ...     partition, clients = context.node_config["partition-id"], context.node_config["num-partitions"]
    ...     adam, key = Adam(request.lr, request.decay), Key(request.seed, "datalens")
    ...     return task.ensemble(partition, clients, request.teachers, adam, batch=request.batch, key=key)
    >>> app = client(ClientApp(), datalens_teachers(teachers))
    """
    return bringing("datalens", "datalens", partial(_bring, ensemble=ensemble))


def _bring(msg: Message, context: Context, ensemble: TeachersOf) -> Brought:
    require_partition(context, "a teacher must know which records are its own")

    def own(me: Me, request: Teachers) -> tuple[NodeTeachers, Arrays]:
        # Where images come instead, there is no generator.
        generator = next(iter(models(msg.content).values()), None)
        return ensemble(msg, context, request), {} if generator is None else to_arrays(generator)

    return Brought(own)
