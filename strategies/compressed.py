"""The server half of the drop-in pair: any Flower strategy, with compressed updates.

``Compressed(FedAvg(...), TopK(density=0.01))`` is the program of the pair (:mod:`fedcomp.systems.pair`) around a
strategy that says who trains and what becomes of the updates. When that is a weighted mean the frames are summed
straight into one buffer, so that aggregation memory is one model whatever the number of clients; any other strategy is
handed dense replies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp import params
from fedcomp.codecs import Codec, Replay, get_codec
from fedcomp.codecs.auto import Auto
from fedcomp.codecs.eden import EDEN
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError
from fedcomp.flower.logs import log
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import ReportSection, figure
from fedcomp.layout import NONE_DENSE, DensityPolicy, Layout, TensorSpec
from fedcomp.program import Mean, Now, Single, Step
from fedcomp.rng import Key
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.flower_dp import require_clip_holds, require_clip_is_seen
from fedcomp.strategies.round_log import RoundLog
from fedcomp.strategies.running import Running
from fedcomp.strategies.server import Server
from fedcomp.systems.pair import Pair
from fedcomp.versions import check_codec

DEFAULT_CODEC: Final = EDEN(bits=1)
"""What clients send unless another codec is named."""

ANY_LAYOUT: Final = Layout((TensorSpec("layer", (64, 64), "float32", 0, 4096),), (), ("layer",))
"""Stands for a model that is not known yet; the first one is checked by its own layout."""

MOST_NOISE: Final = 2.0
"""Noise of the mean for each unit of its signal up to which training follows that without compression (measured)."""


@dataclass
class Noise(ReportSection, name="noise"):
    """What an unbiased codec that knows its error adds to a report.

    Attributes
    ----------
    over_signal : float
        Energy of the mean's error for each unit of its signal's, were the updates all alike; above 2 training suffers.
    """

    over_signal: float = figure(0.0)

    def line(self) -> str:
        """Return the figure in words."""
        return f"noise {self.over_signal:.2g} times the signal" if self.over_signal else ""


class Compressed(Server):
    """Compress the messages between an inner Flower strategy and its clients.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy that works through the ``configure_*``/``aggregate_*`` hooks, a private one included. With a
        codec that lists coordinates, FedAdam, FedYogi and FedAdagrad update moments and take steps only at coordinates
        where values arrived (:mod:`fedcomp.strategies.adaptive`).
    codec : Codec or dict, optional
        The codec of the uplink. The clients learn it from the server's messages. Default: EDEN with one bit per value,
        32 times fewer bytes. It is unbiased and needs no memory, so it suits runs of any length and clients that seldom
        return. If the same clients return for many rounds, ``TopK(density=0.01, values="q2")`` sends 300 times fewer
        bytes, but learns more slowly at first. With an inner strategy that bounds or inspects single updates (a private
        one, a median) use a codec with less error, such as ``EDEN(bits=4)`` or ``TopK``.
    downlink : Codec or dict, optional
        The codec of the downlink: compressed differences to nodes whose acknowledged version the server knows, the full
        model to the others, with a digest check of every version. None sends the model as the inner strategy does. A
        codec that is not a contraction is refused, because the replicas would diverge; ``EDEN(scale="least")`` is a
        contraction.
    feedback : bool, optional
        Whether to wrap ``codec`` in error feedback. Default: if it is biased, has no memory of its own and does not
        vote.
    policy : DensityPolicy, optional
        Decides which tensors are sent dense. Default: only running statistics, :data:`fedcomp.layout.NONE_DENSE`;
        :class:`fedcomp.layout.SmallDense` adds small tensors.
    guard : Norms, optional
        Refuses updates with an unusually large norm or weight; by default none is refused. Not allowed with a private
        strategy that bounds every update itself, which all do except local privacy.
    record : str, optional
        Name of the model's ArrayRecord if messages of the inner strategy hold several. The other records pass
        unchanged, unchecked and uncompressed, in both directions. Replies must use the same name for the model.
        Default: the only ArrayRecord of a message.
    first_model_at_nodes : bool
        Send only the digest of the run's first model; each node creates the same model by the ``first_model`` of
        :func:`fedcomp.clients.compressed.compression`. A node that cannot, or whose model differs in any bit, is
        refused for the round and gets the whole model with its next message. Needs a ``downlink``.
    packed : bool
        Send whole models (the first one, to nodes that were away, and in every round without a ``downlink``) with
        entropy-coded exponents: without loss, in 1.2 times fewer bytes for float32. A client without
        :func:`fedcomp.clients.compressed.compression` cannot read them: it is refused for one round, by name, and gets
        plain models from then on.
    seed : int
        Seed of the random streams of clients and server.

    Attributes
    ----------
    reports, evaluations, roster
        Of :class:`fedcomp.strategies.server.Server`.

    Raises
    ------
    ConfigError
        When the codec needs several exchanges, when it votes and the inner strategy is not a weighted mean, when the
        inner strategy does not use Flower's hooks for its rounds, when it is one of Flower's client-side privacy
        wrappers and the codec may enlarge an update, when the downlink is not a contraction or keeps a memory of its
        own, or when nodes are to make the first model and there is no downlink.

    Notes
    -----
    An inner strategy that overrides ``start`` runs its own loop with this strategy's hooks. All other
    attributes are delegated to the inner strategy, for reading, calling and setting.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAdam
    >>> from fedcomp.codecs import TopK
    >>> strategy = Compressed(FedAdam(), TopK(density=0.01), downlink=TopK(density=0.05))
    >>> strategy.codec
    ErrorFeedback(codec=TopK(density=0.01))
    """

    by_hooks: ClassVar[bool] = True

    kind: ClassVar[type[Pair]] = Pair

    STATE: ClassVar[Mapping[str, Any]] = {**Server.STATE, "settled": dict}

    system: Pair

    def __init__(
        self,
        inner: Strategy,
        codec: Codec | dict[str, Any] = DEFAULT_CODEC,
        downlink: Codec | dict[str, Any] | None = None,
        *,
        feedback: bool | None = None,
        policy: DensityPolicy | None = None,
        guard: Norms | None = None,
        record: str | None = None,
        first_model_at_nodes: bool = False,
        packed: bool = False,
        seed: int = 0,
    ) -> None:
        if isinstance(inner, Codec):
            raise ConfigError(f"the strategy comes first, then the codec: {type(self).__name__}(FedAvg(), {inner!r})")
        self.codec, self._feedback = remembering(get_codec(codec), feedback), feedback
        down = None if downlink is None else get_codec(downlink)
        super().__init__(
            self.kind(self.codec),
            inner,
            downlink=down.downwards() if isinstance(down, Auto) else down,
            policy=NONE_DENSE if policy is None else policy,
            guard=guard,
            record=record,
            first_model_at_nodes=first_model_at_nodes,
            packed=packed,
            seed=seed,
        )
        self._rule.check(self.codec, guard)
        self._rule.within(self._released)
        # With the memory around it: it is the memory that lengthens what a client has clipped.
        require_clip_holds(inner, self.codec)
        if self.downlink is not None and not isinstance(self.downlink, Replay):
            check_codec(self.downlink, ANY_LAYOUT)
        # The last one: from here on what is not an attribute of this strategy is one of the inner's.
        self._made = True

    def __repr__(self) -> str:
        down = "" if self.downlink is None else f", downlink={self.downlink!r}"
        return f"{self._name}({type(self.inner).__name__}): {self.codec!r}{down}"

    if not TYPE_CHECKING:  # or no attribute of this class would be checked

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the inner strategy."""
            inner = self.__dict__.get("inner")
            if inner is None or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(inner, name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute of this strategy here; any other, new ones included, on the inner strategy."""
            # The class is asked, too: properties and methods are in no instance's dictionary.
            own = "_made" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name)
            object.__setattr__(self if own else self.inner, name, value)

    def _begin(self) -> None:
        super()._begin()
        self._log = RoundLog(f"{self._name}({type(self.inner).__name__})", self.system.APP)
        self._loud = False
        self.settled: dict[str, Any] = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open the round; return the messages of its exchange.

        Raises
        ------
        ConfigError
            When one of Flower's privacy wrappers stands around this strategy and its clip would not hold.
        """
        # Here and not in the constructor: only now is the wrapper around this strategy among the callers.
        require_clip_is_seen(self, self.codec)
        return super().configure_train(server_round, arrays, config, grid)

    def _opened(self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]) -> Running:
        self._settle(arrays, messages)
        return super()._opened(server_round, arrays, messages)

    def _settle(self, arrays: ArrayRecord, messages: Sequence[Message]) -> None:
        """Decide what the codec leaves open by the first round that asks somebody, once for the run."""
        if not isinstance(self.codec, Auto):
            return
        if messages and not self.settled:
            size = Layout.of(to_arrays(arrays, copy=False), self.policy, cast_floats=self.cast).compressed_size
            asked = {message.metadata.dst_node_id for message in messages}
            everybody = self._grid is None or asked.issuperset(self._grid.get_node_ids())
            if self._rule.kind is Mean:
                codec = self.codec.settled(size, len(asked), everybody)
            else:
                codec = self.codec.fixed(size, single=self._rule.kind is Single)
            # A memory that waits for clients that seldom return is worth less than none (measured).
            feedback = False if self._feedback is None and not everybody else self._feedback
            self.settled = remembering(codec, feedback).to_config()
            log.info("%s: %s", self._name, codec.described(size, len(asked)))
        if self.settled:
            self.system = self.kind(get_codec(self.settled))

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        outcome = super()._take(x, now, step)
        # Clients may weigh nothing, all of them together.
        if (found := x.report.frames.get("noise")) and (total := sum(x.report.weights.values())) > 0:
            shares = {address: weight / total for address, weight in x.report.weights.items()}
            noise = sum(shares.get(address, 0.0) ** 2 * value for address, value in found.items())
            x.report.section(Noise).over_signal = noise
            if noise > MOST_NOISE and not self._loud:
                self._loud = True
                x.report.notes.append(
                    f"the mean's error is about {noise:.2g} times its signal: more bits, or more replies a round, "
                    "would train better"
                )
        return outcome

    def _ask(self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]) -> tuple[Running, Now]:
        x, now = super()._ask(server_round, arrays, messages)
        if x.own and self.codec.votes:
            raise ConfigError(
                f"the inner strategy sends {len(x.own)} model(s) beside the global one; their updates cannot be put to "
                f"the vote of {self.codec!r} with the others. Use a codec without votes"
            )
        return x, now

    def _released(self, arrays: ArrayRecord, server_round: int) -> Layout:
        """Return the layout of what clients send of an update: all of it, or a support that is drawn for all."""
        layout = Layout.of(to_arrays(arrays, copy=False), self.policy, cast_floats=True)
        support = self.codec.common_support(layout, Key(self.seed, "uplink", server_round))
        # Noise is added on the common support alone: the rest of an update is never released.
        return layout if support is None else Layout.flat(int(support.size))

    def identity(self) -> dict[str, str]:
        """Return the codecs, which must not change within a run."""
        return {"uplink": repr(self.codec), "downlink": repr(self.downlink)}


def remembering(codec: Codec, feedback: bool | None) -> Codec:
    """Return a codec with error feedback where it is wanted, by default where updates are biased without it."""
    if codec.phases != 1:
        raise ConfigError(
            f"{codec!r} needs {codec.phases} exchanges per round; Flower's hooks offer one. Use its own strategy"
        )
    if isinstance(codec, Replay):
        raise ConfigError(f"{codec!r} is a downlink codec, not one for client updates; use downlink={codec!r}")
    if feedback is not None:
        params.boolean("feedback", feedback)
    if feedback and codec.lossless:
        raise ConfigError(f"{codec!r} drops nothing, so there is nothing to remember; leave feedback=True out")
    # Unbiased errors average out over rounds and clients; a vote has no error that could be sent later.
    needless = codec.lossless or codec.unbiased or codec.remembers or codec.votes
    wanted = not needless if feedback is None else feedback
    return ErrorFeedback(codec) if wanted and not codec.remembers and not codec.lossless else codec
