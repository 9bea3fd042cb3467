"""The client half of forward gradients: it measures how the loss changes along directions, and sends these numbers.

The app does not train, and nothing is differentiated backwards. The numbers are products with the directions that the
announced :class:`fedcomp.codecs.RandomProjection` draws, so that what the server decodes is an estimate of the
gradient, times a step. They say of a node's data what so many numbers can say, which is no promise of privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.clients.half import CallNext, ClientHalf
from fedcomp.clients.messages import (
    choose,
    find_announcement,
    header_of,
    partition_of,
    plain_content,
    receive,
    require_ids,
)
from fedcomp.clients.private.mod import wants_private
from fedcomp.codecs import RandomProjection
from fedcomp.errors import FedcompError
from fedcomp.exact import encode_exact
from fedcomp.flower.forward import Measure, Measured
from fedcomp.flower.logs import log
from fedcomp.flower.payload import NODE_RECORD, put_reply_frame
from fedcomp.flower.protocol import EXACT, RESYNC, UPDATE, refusal
from fedcomp.flower.record_dp import plan_in
from fedcomp.flower.records import to_arrays
from fedcomp.flower.schema import SchemaError
from fedcomp.forward import ORACLES, Oracle
from fedcomp.layout import Layout, policy_from_config
from fedcomp.rng import Key
from fedcomp.systems.forward import slopes_along

if TYPE_CHECKING:
    from fedcomp.forward.evaluate import Objective

ObjectiveOf = Callable[[Message, Context], "Objective"]
"""``objective(message, context)`` -> the message's model and its loss on examples of this node."""


def forward_gradients(
    objective: ObjectiveOf,
    *,
    oracle: Oracle = "jvp",
    at_once: int = 1,
    accept: Collection[str] | None = None,
) -> ClientHalf:
    """Return the client half of forward gradients; other messages pass through it untouched.

    Parameters
    ----------
    objective : callable
        ``objective(message, context) -> Objective`` of the message's model, on a batch of this node's examples.
    oracle : {"jvp", "differences"}
        How slopes are measured; central differences do for models that cannot be differentiated.
    at_once : int
        Directions in one pass, see :func:`fedcomp.forward.evaluate.slopes`.
    accept : collection of str, optional
        Codec ids this client agrees to use; default all registered ones.

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
    params.choice("oracle", oracle, ORACLES)
    half = _Half(objective, oracle, params.integer("at_once", at_once, low=1), require_ids(accept))
    return ClientHalf(
        "forward_gradients",
        half.mod,
        outside=("compression", "conditional", "lsg", "private", "record_dp"),
        # It answers by itself: guards that stood inside of it would never see the message.
        inside=("votes_only", "coded", "local_privacy"),
    )


@dataclass(frozen=True)
class _Half:
    objective: ObjectiveOf
    oracle: Oracle
    at_once: int
    accept: Collection[str] | None

    def mod(self, msg: Message, context: Context, call_next: CallNext) -> Message:
        """Measure, where the message asks for it."""
        try:
            asked = Measure.find(msg.content)
        except SchemaError as error:
            return refusal(msg, f"what is to be measured is damaged: {error}")
        if asked is None or not msg.metadata.message_type.startswith("train"):
            return call_next(msg, context)
        if wants_private(msg.content):
            return refusal(msg, "a private round needs an update that is bounded and noised; slopes are neither")
        # A plan that cannot be read raises: whoever cannot tell what is asked sends nothing without noise.
        if (plan := plan_in(msg.content)) is not None:
            return refusal(msg, f"the plan is for a training with noise ({plan.method}), and slopes are asked for")
        announced = find_announcement(msg.content)
        codec, reason = (
            (None, "no codec is announced") if announced is None else choose(announced, announced.codec, self.accept)
        )
        if announced is None or not isinstance(codec, RandomProjection):
            return refusal(msg, f"slopes are products with the directions of a codec, and {codec!r} has none {reason}")
        downlink, no_downlink = choose(announced, announced.downlink, self.accept)
        try:
            record, replica = receive(msg.content, announced, downlink, context)
        except FedcompError as error:
            return refusal(msg, f"{RESYNC}: {error}")
        msg.content = plain_content(msg.content, announced, record)
        del msg.content[Measure.KEY]
        before = to_arrays(record)
        layout = Layout.of(before, policy_from_config(announced.policy))

        key = Key(announced.seed, "uplink", announced.round, partition_of(context))
        measured, content = self._measure(msg, context, codec, layout, key)
        said = Measured(asked.round, int(np.isnan(measured).sum()), _beyond(measured, asked.clip))
        if asked.clip:
            measured = np.clip(measured, -asked.clip, asked.clip)
        if said.left_out:
            log.warning("round %d: %d of %d slopes are not finite", asked.round, said.left_out, measured.size)
        header = header_of(content, context, replica, no_downlink)
        header["record"], header["sequence"] = announced.record or "arrays", announced.sequence
        header.update(said.check())
        content[NODE_RECORD] = header
        put_reply_frame(content, UPDATE, codec.frame_of_products(-asked.step * measured, layout, key))
        exact = encode_exact({t.name: before[t.name] for t in layout.exact}, layout)
        if exact is not None:
            put_reply_frame(content, EXACT, exact)
        # As the last act, after everything that can fail.
        if replica is not None:
            replica.save(context)
        return Message(content, reply_to=msg)

    def _measure(
        self, msg: Message, context: Context, codec: RandomProjection, layout: Layout, key: Key
    ) -> tuple[NDArray[np.float64], RecordDict]:
        """Return the slopes, and what is said beside them."""
        found = self.objective(msg, context)
        directions = codec.tangents(layout, key)
        loss, measured = slopes_along(found, directions, layout, oracle=self.oracle, at_once=self.at_once)
        return measured, RecordDict({"metrics": MetricRecord({"num-examples": found.examples, "loss": loss})})


def _beyond(slopes: NDArray[np.float64], clip: float) -> int:
    """Return how many slopes a clip makes smaller; one of 0 is none."""
    return int(np.count_nonzero(np.abs(slopes) > clip)) if clip else 0
