"""Deep gradient compression: top-k of a velocity, with momentum correction, masking, warm-up and local clipping.

Lin, Han, Mao, Wang, Dally 2018, arXiv:1712.01887 (abstract and the authors' public code read; the clipping rule and the
warm-up's figures recalled).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedcomp import params
from fedcomp.codecs.base import State
from fedcomp.codecs.clip import Clip
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.codecs.forms import FORMS, RESTS
from fedcomp.codecs.listed import INDICES
from fedcomp.codecs.positional import SCOPES
from fedcomp.codecs.topk import LONGEST_WARMUP, TopK
from fedcomp.codecs.wrapper import Wrapper
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key
from fedcomp.rules import BelowOne, Density, Int, Maybe, OneOf, Real, Switch
from fedcomp.wire import Frame


@dataclass(frozen=True, repr=False, eq=False)
class DGC(Wrapper):
    """Momentum correction around top-k: each client keeps momentum u and velocity v and sends the largest of v.

    Each round, with update g, as the authors' code does it::

        g = g * min(1, clip / sqrt(clients) / ‖g‖)    # only with clip
        u = momentum * u + g                          # nesterov: u = momentum * (u + g)
        v = v + u                                     # nesterov: v = v + u + g
        send v on I, the k largest of |v|
        v[I] = 0
        u[I] = 0                                      # with masking

    The server adds the mean and must use no momentum of its own. What the layout sends dense (by default small tensors,
    biases among them; the paper sends all one-dimensional ones so, which a density policy can ask for) goes through the
    same momentum, is never masked and leaves no velocity. At density 1 this is momentum SGD without masking, and plain
    SGD on the compressed part with it; both hold bit for bit.

    The authors estimate the threshold from a sample, and cut what is above it to k in the order of indices, which gives
    late coordinates fewer chances. Here exactly the k largest travel.

    Parameters
    ----------
    density : float
        Fraction of coordinates that travels after the warm-up, in (0, 1].
    momentum : float
        In [0, 1). 0 leaves plain error feedback.
    nesterov, masking : bool
        As above.
    warmup : int
        Rounds in which the density falls exponentially to ``density``, see :class:`~fedcomp.codecs.TopK`: with 4 and
        0.001 the first five rounds send 25 %, 6.3 %, 1.6 %, 0.4 %, 0.1 % (75, 93.75, 98.44, 99.6, 99.9 % left out).
        The paper counts epochs.
    clip : float, optional
        Bound on the norm of the sum of all clients' updates; each clips to its share, clip / √clients (recalled),
        before anything is accumulated.
    clients : int
        N of that share: how many clients a round adds up. Only used with ``clip``.
    scope, values, index, rest :
        As for :class:`~fedcomp.codecs.TopK`. ``"layer"`` is what the authors do.
    max_age : int, optional
        Drop momentum and velocity after this many missed rounds.

    Notes
    -----
    Momentum and velocity belong to the client: they live in its state, are rolled back with a lost frame, and momentum
    fades by ``momentum`` per round missed (ours: the paper has no absent clients). State: as
    :class:`~fedcomp.codecs.ErrorFeedback`, ``memory`` is v and ``momentum`` is u.

    Examples
    --------
    >>> import numpy as np
    >>> from fedcomp.layout import Layout, Update
    >>> from fedcomp.rng import Key
    >>> update = Update(np.float32([3, 0, -2, 0, 0.5, 1, 0, -0.1]), Layout.flat(8))
    >>> codec = DGC(density=0.25, warmup=0)
    >>> frame, state = codec.encode(update, codec.init(update.layout), Key(0))
    >>> codec.decode(frame, update.layout)
    array([ 3.,  0., -2.,  0.,  0.,  0.,  0.,  0.], dtype=float32)
    >>> codec.residual(state)
    array([ 0. ,  0. ,  0. ,  0. ,  0.5,  1. ,  0. , -0.1], dtype=float32)
    """

    codec_id: ClassVar[str] = "dgc"
    remembers = True

    density: Density = 0.001
    momentum: BelowOne = 0.9
    nesterov: Switch = False
    masking: Switch = True
    warmup: Annotated[int, Int(0, LONGEST_WARMUP)] = 4
    clip: Annotated[float | None, Maybe(Real(above=0.0))] = None
    clients: Annotated[int, Int(1)] = 1
    scope: Annotated[str, OneOf(*SCOPES)] = "global"
    values: Annotated[str, OneOf(*FORMS)] = "float32"
    index: Annotated[str, OneOf(*INDICES)] = "auto"
    max_age: Annotated[int | None, Maybe(Int(1))] = None
    rest: Annotated[str, OneOf(*RESTS)] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        topk = TopK(self.density, self.scope, self.values, self.index, self.warmup, self.rest)
        memory = ErrorFeedback(
            topk, momentum=self.momentum, nesterov=self.nesterov, masking=self.masking, max_age=self.max_age
        )
        params.assign(self, codec=memory, gain=memory.gain)
        if self.clip is not None:
            # Made only to fail here, not in the first round: a share may be too small to be a positive number.
            Clip(self._share(self.clip))

    def _share(self, clip: float) -> float:
        """Return one client's bound: N independent updates of this norm have a sum of norm about ``clip``."""
        return clip / math.sqrt(self.clients)

    def init(self, layout: Layout) -> State:
        return self.codec.init(layout)

    def encode(self, update: Update, state: State, key: Key) -> tuple[Frame, State]:
        """Clip, accumulate, select; see :meth:`fedcomp.codecs.base.Codec.encode`. The round is the key's."""
        if self.clip is not None:
            update, _ = Clip(self._share(self.clip)).apply(update, {}, key)
        return self.codec.encode(update, state, key)

    def rollback(self, state: State, frame: Frame, layout: Layout) -> State:
        """Return ``state`` with velocity and masked momentum of ``frame`` back in place."""
        return self.codec.rollback(state, frame, layout)
