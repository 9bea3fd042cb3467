"""The client half of conditional rounds (:mod:`fedcomp.systems.conditional`): reports losses, and serves sensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

from flwr.app import Context, Message, RecordDict
from numpy.typing import ArrayLike

from fedcomp.clients.half import ClientHalf
from fedcomp.clients.programs import Brought, bringing
from fedcomp.drift.edge import Arrays, Edge
from fedcomp.drift.schedule import ScheduleSettings
from fedcomp.drift.sensor import Upload
from fedcomp.flower.logs import log
from fedcomp.flower.payload import models
from fedcomp.flower.records import to_arrays
from fedcomp.layout import Update
from fedcomp.program import Me
from fedcomp.systems.conditional import ConditionalRounds

Watch = Callable[[Message, Context], float]
"""``watch(message, context) -> loss`` of the message's model on this node's own held-out data."""


@dataclass(frozen=True)
class Sensors:
    """A node's sensors, as its client half uses them.

    Attributes
    ----------
    edge : callable
        ``edge(context) -> Edge``: stores their windows and deploys models to them.
    measure : callable
        ``measure(message, context, arrays) -> figures``: the sensors' statistic of a model on held-out data; None if
        there are too few data, see :meth:`fedcomp.drift.edge.Deployments.deploy`.
    absorb : callable
        ``absorb(message, context, windows)``: add the sensors' windows to the training data. It may be called again
        with the same windows if the round fails afterwards.
    """

    edge: Callable[[Context], Edge]
    measure: Callable[[Message, Context, Arrays], ArrayLike | None]
    absorb: Callable[[Message, Context, Sequence[Upload]], None]


def conditional(
    watch: Watch, *, sensors: Sensors | None = None, settings: ScheduleSettings | None = None
) -> ClientHalf:
    """Return the half that adds losses and sensors to conditional rounds, which the half ``compression`` answers.

    Parameters
    ----------
    watch : callable
        ``watch(message, context) -> loss`` of the message's model on this node's own held-out data.
    sensors : Sensors, optional
        The sensors of this node; default none.
    settings : ScheduleSettings, optional
        When a model counts as stable.

    Examples
    --------
    >>> from flwr.clientapp import ClientApp
    >>> from fedcomp.clients.client import client
    >>> app = client(ClientApp(), conditional(lambda message, context: 0.5))
    """
    stable = ScheduleSettings() if settings is None else settings

    def data(msg: Message, context: Context) -> Brought:
        node = _Node(msg, context, watch, sensors, stable)
        node.app = Brought(node)
        return node.app

    return bringing("conditional", ConditionalRounds.ID, data)


class _Node:
    """A node in one message: :class:`fedcomp.systems.conditional.Watch`."""

    def __init__(
        self, msg: Message, context: Context, watch: Watch, sensors: Sensors | None, settings: ScheduleSettings
    ) -> None:
        # The app may change what it was sent.
        self._msg = copy(msg)
        self._msg.content = RecordDict(dict(msg.content))
        self._context, self._watch, self._sensors, self.settings = context, watch, sensors, settings
        self._edge = None if sensors is None else sensors.edge(context)
        self.app = Brought(self)

    def loss(self, me: Me, update: Update | None = None) -> float:
        msg = self._msg
        if update is not None:
            # As the app trained it, with what of it is in no update.
            assert self.app.trained is not None
            name = next(iter(models(msg.content)))
            msg = copy(msg)
            msg.content = RecordDict({**self._msg.content, name: self.app.trained})
        return self._watch(msg, self._context)

    def windows(self) -> Mapping[int, Upload]:
        return {} if self._edge is None else self._edge.windows()

    def forget(self, numbers: Iterable[int]) -> None:
        if self._edge is not None:
            self._edge.forget(numbers)

    def absorb(self, windows: Sequence[Upload]) -> None:
        assert self._sensors is not None
        self._sensors.absorb(self._msg, self._context, windows)

    def deploy(self, me: Me) -> None:
        if self._edge is None or self._sensors is None:
            return
        model, measure = next(iter(models(self._msg.content).values())), self._sensors.measure
        version = self._edge.deploy(to_arrays(model), lambda arrays: measure(self._msg, self._context, arrays))
        log.info("round %d: the model is deployed to this node's sensors, as version %d", me.number, version)
