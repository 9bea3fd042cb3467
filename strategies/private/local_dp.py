"""Local differential privacy: the mean of messages that clients have already noised.

``local_dp(FedAvg(fraction_evaluate=0.0), Privatise(1.0, 4.0), TopK(density=0.01), population=1000)`` is the drop-in
pair with :class:`fedcomp.privacy.local.Privatise` before the codec. The server adds no noise and needs no trust; the
price is that every message carries noise of its own: the mean of n has sqrt(n) times as much as under a trusted server,
and twice that, because two messages may be as far apart as 2C.

Clip and noise are each client's own doing. One that leaves them out may send anything finite: reports name the norm of
every message, and a guard refuses what is far out of the ordinary. Both are post-processing of messages.

What the ledger counts is messages: each client that is asked releases one, whether it arrives or not, and the event is
written down before anybody is asked. Who took part is known to the server, so no sampling amplifies anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec, chain, get_codec
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import ConfigError, FedcompError
from fedcomp.layout import DensityPolicy, Layout
from fedcomp.privacy.errors import Unbounded
from fedcomp.privacy.local import Privatise, privatised
from fedcomp.privacy.mechanism import GridGaussian, Mechanism
from fedcomp.privacy.sampling import Sampling
from fedcomp.program import Step
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.private.strategy import PrivateStrategy
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.local import Local
from fedcomp.systems.private.rule import Read

_NOT_COVERED: Final = (
    "the choice of hyper-parameters and of the model, and preprocessing of the data",
    "who takes part, when, how large its messages are, and whether its app fails",
    "a client that reconnects under another node id, unless it counts its messages itself",
    "what else a client's device sends",
)


class LocalMean(PrivateStrategy):
    """The mean of privatised messages. :func:`local_dp` makes it with the codec that privatises.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, which gets the mean; weights are not used.
    privatise : Privatise
        What every client does to its update first.
    **promise
        As :class:`fedcomp.strategies.private.strategy.PrivateStrategy`: delta, population, sampling (not Poisson),
        count, budget, seed. Adjacency is "replace": two clients, or two data sets of one.

    Raises
    ------
    ConfigError
        For arguments that cannot keep the promise.
    """

    takes_plain: ClassVar[bool] = False
    bounds_updates: ClassVar[bool] = False

    def __init__(self, inner: Strategy, privatise: Privatise, **promise: Any) -> None:
        self.privatise = privatise
        # Dropped where they say the same: the settings of all private systems have them.
        for name, only in (("adjacency", "replace"), ("noise", "discrete_gaussian")):
            if promise.pop(name, only) != only:
                raise ConfigError(f"{name} of local privacy is {only!r}")
        sampling = promise.get("sampling")
        if isinstance(sampling, Sampling) and sampling.kind == "poisson":
            raise ConfigError(
                "Poisson sampling amplifies nothing here: the server that draws the clients is the one that is not "
                "trusted. Use sampling='capped' or 'everyone'"
            )
        super().__init__(
            inner,
            noise_multiplier=privatise.noise_multiplier,
            adjacency="replace",
            insecure_deterministic=privatise.insecure_deterministic,
            **promise,
        )

    def check_codec(self, codec: Codec) -> None:
        """Refuse a codec whose messages are not privatised as the ledger accounts for."""
        super().check_codec(codec)
        if privatised(codec) != self.privatise:
            raise ConfigError(f"{codec!r} does not begin with {self.privatise!r}, which the ledger accounts for")

    def may_be_coded(self, construction: str) -> bool:
        """Whether other clients may hold what a client sends: it is privatised."""
        return True

    def adopt(self, arrays: ArrayRecord, layout: Layout | None = None) -> None:
        """Take the model: a client noises all coordinates, also where its codec sends some of them only."""
        super().adopt(arrays)

    def mechanism(self, layout: Layout, server_round: int) -> GridGaussian:
        """Return the mechanism of one client's message."""
        return self.privatise.mechanism(layout.size)

    def opened(self, server_round: int, chosen: Sequence[int]) -> None:
        """Write down that all who are asked release a message, before they are asked."""
        if chosen and self._layout is not None:
            # One event for all: each client's message is a release about that client alone, and they cost in parallel.
            cost = self.event(self.mechanism(self._layout, server_round), self._layout.size)
            self.privacy.record(cost, round=server_round, participants=chosen)

    def release(
        self,
        server_round: int,
        layout: Layout,
        support: NDArray[np.int64] | None,
        given: Iterable[tuple[int, int, Read]],
        refuse: Callable[[int, str], None],
    ) -> Step | None:
        """Return the mean of the messages that came, which costs nothing: they hide nothing by their number."""
        total, used, chosen = np.zeros(layout.size, np.float64), [], frozenset(self.chosen)
        for node, unit, read in given:
            try:
                if unit not in chosen:
                    raise Unbounded(f"node {unit} was not asked in this round")
                message = read()
                if not np.isfinite(message).all():
                    raise Unbounded("the message holds values that are not finite")
                total += message
                used.append(node)
            except FedcompError as why:
                refuse(node, str(why))
        return Step(tuple(used), change=(total / len(used)).astype(np.float32)) if used else None

    def said(self, mechanism: Mechanism) -> dict[str, Any]:
        """Return what the statement says otherwise: the server is not trusted, and every message is protected."""
        clients = "each client's own operating-system entropy, ChaCha20"
        return {
            "name": f"{type(mechanism).__name__} on every client",
            "trust": "nobody is trusted, the server included, which sees noised messages only",
            "protects": "every message of a client, and all that is made from them",
            "not_covered": _NOT_COVERED,
            "dropouts": "a message that does not arrive is counted as if it had",
        } | ({} if self.insecure_deterministic else {"randomness": clients})

    def describe(self) -> str:
        """Return the clip norm."""
        return f"every client clips its update to L2 norm {self.privatise.clip:g}"

    def describe_settings(self) -> str:
        """Return what every client does."""
        return repr(self.privatise)


class LocalDp(Compressed):
    """The drop-in pair whose clients privatise, as :func:`local_dp` makes it."""

    kind: ClassVar[type[Pair]] = Local


def local_dp(
    inner: Strategy,
    privatise: Privatise,
    codec: Codec | dict[str, Any],
    *,
    feedback: bool = False,
    downlink: Codec | dict[str, Any] | None = None,
    policy: DensityPolicy | None = None,
    guard: Norms | None = None,
    seed: int = 0,
    **promise: Any,
) -> LocalDp:
    """Return local privacy inside the drop-in pair.

    Parameters
    ----------
    inner : Strategy
    privatise : Privatise
        What every client does to its update first; its ``releases`` is the limit that clients are asked to keep.
    codec : Codec or dict
        The codec applied to the noised update, as post-processing.
    feedback : bool
        Remember which part of the *noised* update was not sent.
    downlink, policy, guard, seed
        See :class:`fedcomp.strategies.compressed.Compressed`. Without a guard, a single client that does not clip can
        ruin the model.
    **promise
        See :class:`LocalMean`.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import QSGD
    >>> noise = Privatise(clip=1.0, noise_multiplier=4.0)
    >>> strategy = local_dp(FedAvg(fraction_evaluate=0.0), noise, QSGD(levels=8), population=1000)
    """
    last = get_codec(codec)
    if feedback and not last.remembers:
        # Around the codec, not around the chain: what it remembers was noised before.
        last = ErrorFeedback(last)
    mean = LocalMean(inner, privatise, seed=seed, **promise)
    # No feedback of the pair's own, which would remember the update without its noise.
    return LocalDp(mean, chain(privatise, last), downlink, feedback=False, policy=policy, guard=guard, seed=seed)
