"""The client half of forward gradients: measures how the loss changes along random directions.

The app does not train, and nothing is differentiated backwards. The numbers are products with the directions that
:class:`fedcomp.codecs.RandomProjection` draws, so that what the server decodes is an estimate of the gradient, times a
step. They say of a node's data what so many numbers can say, which is no promise of privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context, Message, MetricRecord
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.clients.half import ClientHalf
from fedcomp.clients.programs import Brings, Brought, bringing
from fedcomp.forward import ORACLES, Oracle
from fedcomp.layout import Vector
from fedcomp.program import Me
from fedcomp.systems.forward import Forward, slopes_along

if TYPE_CHECKING:
    from fedcomp.forward.evaluate import Objective

ObjectiveOf = Callable[[Message, Context], "Objective"]
"""``objective(message, context)`` -> the message's model and its loss on examples of this node."""


def slopes(objective: ObjectiveOf, *, oracle: Oracle = "jvp", at_once: int = 1) -> Brings:
    """Return what an app brings for forward gradients, as :func:`fedcomp.clients.programs.bringing` takes it.

    Parameters
    ----------
    objective : callable
        ``objective(message, context) -> Objective`` of the message's model, on a batch of this node's examples.
    oracle : {"jvp", "differences"}
        How slopes are measured; central differences do for models that cannot be differentiated.
    at_once : int
        Directions in one pass, see :func:`fedcomp.forward.evaluate.slopes`.
    """
    params.choice("oracle", oracle, ORACLES)
    passes = params.integer("at_once", at_once, low=1)

    def data(msg: Message, context: Context) -> Brought:
        def measures(me: Me, directions: Iterable[Vector]) -> NDArray[np.float64]:
            found = objective(msg, context)
            loss, measured = slopes_along(found, directions, me.layout, oracle=oracle, at_once=passes)
            app.reply["metrics"] = MetricRecord({"num-examples": found.examples, "loss": loss})
            return measured

        app = Brought(measures)
        return app

    return data


def forward_gradients(objective: ObjectiveOf, *, oracle: Oracle = "jvp", at_once: int = 1) -> ClientHalf:
    """Return the client half of forward gradients, which measures :func:`slopes` of an objective.

    Parameters
    ----------
    objective, oracle, at_once
        As of :func:`slopes`.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from torch import nn
    >>> from fedcomp.clients.client import client
    >>> from fedcomp.forward.evaluate import Objective
    >>> def objective(message, context):
    ...     module = nn.Linear(4, 2)
    ...     module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    ...     return Objective(module, lambda model: model(x).square().mean(), examples=len(x))
    >>> app = client(ClientApp(), forward_gradients(objective))
    """
    return bringing("forward_gradients", Forward.ID, slopes(objective, oracle=oracle, at_once=at_once))
