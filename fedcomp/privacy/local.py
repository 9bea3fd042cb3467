"""Local differential privacy: each client's message is private before it leaves, so the server need not be trusted.

:class:`Privatise` is a transform of a codec chain: it clips the update, rounds it to a public grid and adds integer
Gaussian noise. Whatever follows it in the chain (selection, quantisation, packing, error feedback on the noised
vector) is post-processing and costs nothing. Any two clients, and any two data sets of one, give messages whose
noiseless vectors are at most 2C apart, so the noise is scaled to 2C: adjacency "replace", which is what local privacy
is about.

Three things differ from noise at the server. Randomness is the client's own operating system's, fresh for every message
and unknown to the server. A message that is delivered again is answered with the stored frame, because a second noise
on the same update would show it. And who limits the number of messages is the client (:class:`LocalPolicy`): a server
that is not trusted cannot be trusted with the budget either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np

from fedcomp.codecs.base import Codec, State, all_finite
from fedcomp.codecs.chain import Chain, Transform, registry
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.errors import StateError
from fedcomp.layout import Layout, Update
from fedcomp.privacy.entropy import make_entropy
from fedcomp.privacy.errors import BudgetExceeded
from fedcomp.privacy.mechanism import GridGaussian
from fedcomp.rng import Key
from fedcomp.rules import Configured, Int, NotNegative, Positive, Switch

_COUNT = "releases"


@registry.register
@dataclass(frozen=True, repr=False)
class Privatise(Transform):
    """Clip to L2 norm ``clip``, round to the grid, add discrete Gaussian noise.

    An update with NaN or infinity becomes pure noise, since an error message would reveal something about the data.

    Parameters
    ----------
    clip : float
        Bound C on the update's L2 norm, all tensors together.
    noise_multiplier : float
        Standard deviation of the noise over 2C. With 0 there is no noise and no guarantee.
    releases : int
        Largest number of messages per client, 0 for no limit. The server sets it; a client's own limit, independent of
        the server, is :class:`LocalPolicy`.
    insecure_deterministic : bool
        Draw the noise from the key, which the server knows: for experiments that must repeat.

    Notes
    -----
    State: ``releases``, a 0-d int64, the number of messages sent. A rollback does not decrease it, because
    an unacknowledged message may still have been read.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.codecs import QSGD, chain
    >>> codec = chain(Privatise(clip=1.0, noise_multiplier=4.0), QSGD(levels=8))
    >>> privatised(codec)
    Privatise(clip=1.0, noise_multiplier=4.0)
    """

    transform_id: ClassVar[str] = "privatise"

    clip: Positive
    noise_multiplier: NotNegative
    releases: Annotated[int, Int()] = 0
    insecure_deterministic: Switch = False

    def mechanism(self, size: int) -> GridGaussian:
        """Return the mechanism of one message of ``size`` coordinates."""
        return GridGaussian(clip=self.clip, size=size, noise_multiplier=self.noise_multiplier, adjacency="replace")

    def init(self, layout: Layout) -> State:
        """Return the count of a client that has sent nothing yet."""
        return {_COUNT: np.asarray(0, np.int64)}

    def apply(self, update: Update, state: State, key: Key) -> tuple[Update, State]:
        """Return the noised update, float32 multiples of the grid's step, and the state with one message more.

        Raises
        ------
        BudgetExceeded
            When ``releases`` messages have left.
        StateError
            When the state holds no count.
        """
        sent = _sent(state)
        if self.releases and sent >= self.releases:
            raise BudgetExceeded(f"this client has sent {sent} private messages of {self.releases}; it sends no more")
        # Also of an empty update: it is a message.
        after: State = {_COUNT: np.asarray(sent + 1, np.int64)}
        if not update.vector.size:
            return update, after
        mechanism = self.mechanism(update.vector.size)
        given = update.vector if all_finite(update.vector) else np.zeros_like(update.vector)
        # The key, which the server knows, names the noise where experiments ask for that alone.
        entropy = make_entropy(key.at(purpose="privatise"), insecure_deterministic=self.insecure_deterministic)
        noisy = mechanism.perturb(mechanism.admit(given), entropy)
        # Rounding to float32 comes after the noise, and costs nothing.
        return Update(noisy.astype(np.float32), update.layout), after


def _sent(state: State) -> int:
    count = state.get(_COUNT)
    if not isinstance(count, np.ndarray | np.generic) or count.shape != () or count.dtype.kind not in "iu":
        raise StateError("the state holds no count of private messages; start from init(layout)")
    return int(count)


@dataclass(frozen=True, kw_only=True)
class LocalPolicy(Configured):
    """A client's own requirements on every training message, independent of the server.

    Parameters
    ----------
    noise_multiplier : float
        Smallest noise multiplier, relative to the distance 2C of two clipped updates.
    releases : int
        Largest number of messages in the lifetime of the node's state, over all sessions, runs and codecs of the
        server.

    Notes
    -----
    The server may choose clip norm and codec: the guarantee of a message depends on its noise multiplier
    only.

    Examples
    --------
    >>> from fedcomp.codecs import TopK
    >>> LocalPolicy(noise_multiplier=4.0, releases=20).refuses(TopK(0.1))
    'this client sends privatised updates only, and the announced codec does not privatise'
    """

    noise_multiplier: Positive
    releases: Annotated[int, Int(1)]

    def refuses(self, codec: Codec | None) -> str:
        """Return why this client sends nothing encoded by ``codec``, empty when it may."""
        # No codec at all means a dense update, which has no noise either.
        found = None if codec is None else privatised(codec)
        if found is None:
            return "this client sends privatised updates only, and the announced codec does not privatise"
        # A seed of the server's would let it take the noise off again.
        if found.insecure_deterministic:
            return "this client draws its own noise, and the announced codec takes it from a seed"
        if found.noise_multiplier < self.noise_multiplier:
            return (
                f"this client adds noise of multiplier {self.noise_multiplier:g} or more, the announced codec "
                f"{found.noise_multiplier:g}"
            )
        return ""


def asks_for_noise(config: Any) -> bool:
    """Whether the description of a codec names :class:`Privatise` anywhere, also of a codec that cannot be made here.

    A client that cannot use an announced codec answers without it, which here would be an answer without noise.
    """
    if isinstance(config, Mapping):
        return config.get("id") == Privatise.transform_id or any(map(asks_for_noise, config.values()))
    return isinstance(config, list) and any(map(asks_for_noise, config))


def privatised(codec: Codec) -> Privatise | None:
    """Return the transform that makes ``codec``'s messages private, None when they are not.

    Only chains and error feedback are looked into: another codec around them could let something past the noise.
    """
    while True:
        if isinstance(codec, Chain):
            for transform in codec.transforms:
                if isinstance(transform, Privatise):
                    return transform
        # Any other codec around the chain is not looked into: it might send something that passed the noise by.
        elif not isinstance(codec, ErrorFeedback):
            return None
        codec = codec.codec
