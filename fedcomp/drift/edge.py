"""Both ends of an edge-sensor link: models and sketches go down, and windows that differ come up.

An :class:`Edge` deploys models to any number of sensors, as steps from the version that each of them runs; a
:class:`SensorEndpoint` stands where inference runs. What is between them is a :class:`SensorLink`: two queues in one
process (:func:`local_link`), or a socket (:mod:`fedcomp.clients.sensors`). Both count their bytes.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedcomp.codecs import Codec, Identity, get_codec
from fedcomp.drift.distance import QuantileSketch, calibrated
from fedcomp.drift.messages import ModelMessage, Says, SensorError, SensorMessage
from fedcomp.drift.sensor import Sensor, SensorSettings, Upload
from fedcomp.drift.statistics import Statistic, statistic_of
from fedcomp.errors import FedcompError, StateError
from fedcomp.exact import decode_exact, encode_exact
from fedcomp.layout import DensityPolicy, Layout, Update, policy_config
from fedcomp.logs import log
from fedcomp.rng import Key
from fedcomp.rules import Int, checked
from fedcomp.stateful import Stateful, nested
from fedcomp.versions import Broadcast, Step, advance, digest

Arrays = Mapping[str, NDArray[Any]]

Measure = Callable[[Arrays], ArrayLike | None]
"""``measure(arrays) -> figures`` of a model on held-out data; see :meth:`Deployments.deploy`."""

_WHOLE: Final = Identity()


@dataclass
class LinkTraffic:
    """What one end of a link has sent and received.

    Attributes
    ----------
    sent, received : int
        Bytes, framing included.
    sent_messages, received_messages : int
    """

    sent: int = 0
    received: int = 0
    sent_messages: int = 0
    received_messages: int = 0


class SensorLink(Protocol):
    """One end of a link."""

    traffic: LinkTraffic

    def send(self, message: bytes) -> None:
        """Send a message.

        Raises
        ------
        OSError
            When the other end is gone.
        """

    def receive(self) -> bytes | None:
        """Return the next message that has come; None when there is none."""


class LocalLink:
    """One end of a link within a process."""

    def __init__(self, inbox: deque[bytes], outbox: deque[bytes]) -> None:
        self.traffic = LinkTraffic()
        self._inbox, self._outbox = inbox, outbox

    def send(self, message: bytes) -> None:
        """Put a message into the other end's queue."""
        self.traffic.sent += len(message)
        self.traffic.sent_messages += 1
        self._outbox.append(message)

    def receive(self) -> bytes | None:
        """Return the next message of this end's queue."""
        if not self._inbox:
            return None
        message = self._inbox.popleft()
        self.traffic.received += len(message)
        self.traffic.received_messages += 1
        return message


def local_link() -> tuple[LocalLink, LocalLink]:
    """Return the two ends of a link within a process."""
    one: deque[bytes] = deque()
    other: deque[bytes] = deque()
    return LocalLink(one, other), LocalLink(other, one)


class Deployments(Stateful):
    """The deployed model, what its figures are compared with, and the way to it from versions that sensors run.

    Parameters
    ----------
    model : mapping of name to ndarray
        Names, shapes and dtypes of the models to come.
    codec : Codec or dict, optional
        What steps between deployed models are compressed with; default they travel whole.
    policy : DensityPolicy, optional
        Which tensors of a step travel dense.
    window : int
        Of the sensors: thresholds are calibrated for it.
    seed : int
        Of calibration, and of codecs that draw.

    Attributes
    ----------
    threshold : float
        Distance above which a window is unlike the reference.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "broadcast": nested("broadcast"),
        "threshold": float,
        "_quantiles": NDArray[np.float32],
    }

    def __init__(
        self,
        model: Arrays,
        codec: Codec | dict[str, Any] | None = None,
        *,
        policy: DensityPolicy | None = None,
        window: int = 100,
        seed: int = 0,
    ) -> None:
        self.broadcast = Broadcast(Identity() if codec is None else get_codec(codec))
        self.window: int = checked("window", window, Int(1))
        self.seed = seed
        self.threshold = 1.0
        self._layout = _layout_of(model, self.broadcast.codec, policy)
        self._policy = policy
        self._quantiles = np.empty(0, np.float32)

    def identity(self) -> dict[str, Any]:
        return {"codec": repr(self.broadcast.codec), "window": self.window}

    def made_from(self) -> dict[str, Any]:
        """Return the parameters beside the model, as plain data: what another process makes an equal object from."""
        policy = policy_config(self._policy, self._layout)
        return {"codec": self.broadcast.codec.to_config(), "policy": policy, "window": self.window, "seed": self.seed}

    @property
    def version(self) -> int:
        """Version of the deployed model; 0 before the first one."""
        return self.broadcast.version

    def deploy(self, arrays: Arrays, measure: Measure) -> int:
        """Make a model the one that sensors run, and calibrate it; return its version.

        Parameters
        ----------
        arrays : mapping of name to ndarray
        measure : callable
            ``measure(arrays) -> figures``: the sensors' statistic on held-out data, at least two windows of it. It is
            given the model as sensors will have it, which a lossy step makes another one. None where there are not
            enough such data: the sensors then send every full window.

        Raises
        ------
        ConfigError
            When the figures are too few, or hold NaN; nothing is deployed then.
        NonFiniteUpdate
            When the model holds NaN or infinity.
        LayoutError
            When the model is not of the shapes that were announced.
        """
        layout, broadcast = self._layout, self.broadcast
        layout.check(arrays)
        # A copy: steps are added in place.
        before, saved = broadcast.version, copy.deepcopy(broadcast.state_dict())
        vector, exact = layout.flatten(arrays), {t.name: np.asarray(arrays[t.name]) for t in layout.exact}
        try:
            if broadcast.publish(vector, exact, layout, Key(self.seed, "drift/step", before + 1)) == before:
                # The former model with a new reference, for which sensors must not take the one they have.
                broadcast.adopt(vector, exact, layout)
            figures = measure(layout.unflatten(broadcast.reference, broadcast.exact))
            if figures is None:
                self.threshold, self._quantiles = 1.0, np.empty(0, np.float32)
            else:
                threshold = calibrated(figures, self.window, Key(self.seed, "drift/calibration", before + 1))
                self.threshold, self._quantiles = threshold, QuantileSketch.of(figures).quantiles
        except BaseException:
            # A version without its reference would be taken for the deployed one.
            broadcast.load_state_dict(saved)
            raise
        return broadcast.version

    def message(self, version: int) -> ModelMessage:
        """Return what brings a sensor from ``version`` to the deployed model."""
        base, steps = version, self.broadcast.steps_from(version)
        if steps is None:
            base, steps = 0, [self._whole()]
        sketch = QuantileSketch(self._quantiles) if self._quantiles.size else None
        return ModelMessage(self.version, base, self.threshold, self.broadcast.digest, sketch, steps)

    def _whole(self) -> Step:
        frame, _ = _WHOLE.encode(Update(self.broadcast.reference, self._layout), {}, Key(self.seed))
        return Step(self.version, frame, encode_exact(self.broadcast.exact, self._layout))


class Edge:
    """What an edge holds for its sensors: the deployed model, who runs which version, and windows that came.

    Parameters
    ----------
    deployments : Deployments
    most : int
        Windows that are kept until they are forgotten; the oldest go first, and are counted.

    Attributes
    ----------
    versions : dict of int to int
        By sensor: the version that it has, or is being sent.
    dropped : int
        Windows that nobody looked at in time.

    Examples
    --------
    >>> import numpy as np
    >>> here, there = local_link()
    >>> model = {"w": np.zeros(3, np.float32)}
    >>> edge = Edge(Deployments(model, window=20))
    >>> sensor = SensorEndpoint(7, model, there, settings=SensorSettings(window=20))
    >>> edge.deploy({"w": np.ones(3, np.float32)}, lambda deployed: np.linspace(0.5, 1.0, 100))
    1
    >>> sensor.heartbeat()
    >>> edge.serve(here)
    >>> sensor.update()["w"], edge.versions
    (array([1., 1., 1.], dtype=float32), {7: 1})
    """

    def __init__(self, deployments: Deployments, *, most: int = 64) -> None:
        self.deployments = deployments
        self.most: int = checked("most", most, Int(1))
        self.versions: dict[int, int] = {}
        self.dropped = 0
        # By sensor: over which link it said last which version it runs.
        self._said: dict[int, tuple[SensorLink, int]] = {}
        # As bytes: what came is kept as it came, wherever it is kept.
        self._windows: dict[int, bytes] = {}
        self._number = 0

    def deploy(self, arrays: Arrays, measure: Measure) -> int:
        """Deploy a model, see :meth:`Deployments.deploy`; sensors are sent it when they are next served."""
        return self.deployments.deploy(arrays, measure)

    def windows(self) -> dict[int, Upload]:
        """Return the windows that have come, by number."""
        found = {number: SensorMessage.from_bytes(data).upload for number, data in self._windows.items()}
        return {number: upload for number, upload in found.items() if upload is not None}

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop windows that were used."""
        for number in numbers:
            self._windows.pop(number, None)

    def serve(self, link: SensorLink) -> None:
        """Take all that has come over a link, and send the model to a sensor that runs another one.

        What cannot be read is logged, and nothing else happens.
        """
        while (data := link.receive()) is not None:
            try:
                self.handle(data, link)
            except SensorError as error:
                log.warning("a sensor's message is not used: %s", error)

    def handle(self, data: bytes, link: SensorLink) -> int:
        """Take one message of a sensor, send it the model where it runs another one, and return its number.

        Raises
        ------
        SensorError
            When it cannot be read.
        """
        message = SensorMessage.from_bytes(data)
        said = link, message.version
        if message.says is Says.RESYNC:
            self.versions[message.sensor] = 0
        # Who says again what it said before has not read yet what it was sent: again, that would fill a slow link.
        elif self._said.get(message.sensor) != said:
            self.versions[message.sensor] = message.version
        self._said[message.sensor] = said
        if message.upload is not None:
            self.keep(data)
        self.push(message.sensor, link)
        return message.sensor

    def gone(self, sensor: int) -> None:
        """Forget a sensor whose link is closed: what it was sent it may never have read."""
        self.versions.pop(sensor, None)
        self._said.pop(sensor, None)

    def keep(self, data: bytes) -> None:
        """Keep a message that brought a window."""
        self._number += 1
        self._windows[self._number] = data
        if len(self._windows) > self.most:
            del self._windows[min(self._windows)]
            self.drop()

    def drop(self) -> None:
        """Count a window that had to go, and say so."""
        self.dropped += 1
        log.warning("more than %d windows arrived without being read; the oldest is dropped", self.most)

    def push(self, sensor: int, link: SensorLink) -> None:
        """Send a sensor the deployed model, unless it has it."""
        version = self.deployments.version
        if version and self.versions.get(sensor, 0) != version:
            link.send(self.deployments.message(self.versions.get(sensor, 0)).to_bytes())
            self.versions[sensor] = version


class SensorEndpoint(Stateful):
    """A sensor's own end: the model it runs, its figures, and what leaves when they are unlike the reference.

    Parameters
    ----------
    number : int
        Tells the sensors of an edge apart, in [0, 2**32).
    model : mapping of name to ndarray
        Names, shapes and dtypes of the models to come.
    link : SensorLink
    codec : Codec or dict, optional
        The edge's.
    policy : DensityPolicy, optional
        The edge's.
    statistic : {"confidence", "loss"} or callable
        One figure per inference, see :mod:`fedcomp.drift.statistics`; the edge calibrates with the same.
    settings : SensorSettings, optional

    Attributes
    ----------
    sensor : Sensor
    arrays : dict of str to ndarray
        The model that runs; empty before the first one.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "sensor": nested("sensor"),
        "_vector": NDArray[np.float32],
        "_exact": dict[str, NDArray[Any]],
        "_unsent": bytes,
    }

    def __init__(
        self,
        number: int,
        model: Arrays,
        link: SensorLink,
        *,
        codec: Codec | dict[str, Any] | None = None,
        policy: DensityPolicy | None = None,
        statistic: str | Statistic = "confidence",
        settings: SensorSettings | None = None,
    ) -> None:
        self.number: int = checked("number", number, Int(0, (1 << 32) - 1))
        self.sensor = Sensor(settings)
        self.link = link
        self.statistic = statistic_of(statistic)
        self._codec = Identity() if codec is None else get_codec(codec)
        self._layout = _layout_of(model, self._codec, policy)
        self._vector = np.empty(0, np.float32)
        self._exact: dict[str, NDArray[Any]] = {}
        self._unsent = b""
        self._asked = False

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The model that runs; empty before the first one."""
        return self._layout.unflatten(self._vector, self._exact) if self.sensor.version else {}

    def heartbeat(self) -> None:
        """Send nine bytes: this sensor is there, and runs this version."""
        self._say(Says.HEARTBEAT)

    def update(self) -> dict[str, NDArray[Any]]:
        """Take the models that have come; return the last one, or an empty dictionary when there is none.

        Steps that cannot be used are answered by asking for the whole model; a whole model is not, or the two would go
        on for ever. What cannot be read counts as steps, and after asking as the whole model.
        """
        changed = False
        while (data := self.link.receive()) is not None:
            whole, self._asked = self._asked, False
            try:
                deployment = ModelMessage.from_bytes(data)
                whole = not deployment.base
                changed = self._apply(deployment) or changed
            except FedcompError as error:
                does = "waits for the next one" if whole else "asks for the whole one"
                log.warning("sensor %d cannot use a model that it was sent, and %s: %s", self.number, does, error)
                if not whole:
                    self._say(Says.RESYNC)
                    self._asked = True
        return self.arrays if changed else {}

    def observe(self, logits: ArrayLike, samples: ArrayLike, labels: ArrayLike | None = None) -> bool:
        """Take the inferences of one tick; return whether a window was sent to the edge.

        One that could not be sent, since the edge was away, is sent with the next tick, unless a newer one takes its
        place; ``link`` may be replaced.

        Parameters
        ----------
        logits : array-like, shape (inferences, classes)
        samples : array-like, shape (inferences, ...)
        labels : array-like, shape (inferences,), optional

        Raises
        ------
        ConfigError
            When they do not go together, or the statistic needs labels and there are none.
        """
        known = None if labels is None else np.asarray(labels)
        upload = self.sensor.observe(self.statistic(np.asarray(logits), known), samples, labels)
        if upload is not None:
            if self._unsent:
                log.warning(
                    "sensor %d has a newer window than the one that it could not send, which is lost", self.number
                )
            self._unsent = SensorMessage.of(self.number, upload).to_bytes()
        if not self._unsent:
            return False
        try:
            self.link.send(self._unsent)
        except OSError as error:
            log.warning("sensor %d cannot send its window now, and tries again: %s", self.number, error)
            return False
        self._unsent = b""
        return True

    def _say(self, says: Says) -> None:
        self.link.send(SensorMessage(self.number, self.sensor.version, says).to_bytes())

    def _apply(self, deployment: ModelMessage) -> bool:
        """Make a model the one that runs; return False where it runs already."""
        layout = self._layout
        if deployment.version == self.sensor.version and deployment.digest == digest(self._vector, self._exact):
            # The edge answered a window from before this model, which was sent late.
            return False
        if deployment.base:
            if deployment.base != self.sensor.version:
                raise StateError(f"it starts from version {deployment.base}, this sensor runs {self.sensor.version}")
            # A copy: what comes of it may not be the deployed model.
            vector, exact, _ = advance(
                self._vector.copy(), self._exact, deployment.base, deployment.steps, self._codec, layout
            )
        else:
            (whole,) = deployment.steps
            vector, exact = _WHOLE.decode(whole.frame, layout), decode_exact(whole.exact, layout)
        if digest(vector, exact) != deployment.digest:
            raise StateError(f"the received model is not version {deployment.version}: digests differ")
        self._vector, self._exact = vector, exact
        self.sensor.deploy(deployment.version, deployment.sketch, deployment.threshold)
        return True


def _layout_of(model: Arrays, codec: Codec, policy: DensityPolicy | None) -> Layout:
    return Layout.of(dict(model), policy, cast_floats=not codec.lossless)
