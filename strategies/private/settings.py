"""Settings of private strategies apart from the budget: noise shares, and how teachers vote and learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedcomp.rules import (
    AboveZero,
    BelowOne,
    Configured,
    Int,
    Maybe,
    NotNegative,
    OneOf,
    Positive,
    Real,
    Switch,
)
from fedcomp.systems.private.datalens import SENDS


@dataclass(frozen=True, kw_only=True)
class ShareSettings(Configured):
    """How clients bound their updates and share the noise of a sum.

    Parameters
    ----------
    clip : float
        Largest L2 norm of one client's update, in the units of the update.
    tolerated : int
        Clients of a round that may vanish. Each client's share is sigma^2 / (floor(honest n) - tolerated).
    honest : float
        Fraction of clients whose noise the adversary does not know. 1 is right only for an adversary outside the round,
        since a client knows its own noise.
    threshold : int
        T: any T clients together learn nothing about others from the shards they hold. At least the number of dishonest
        clients.
    scale : int
        Grid steps of the clip norm; 0 chooses, see :class:`fedcomp.privacy.distributed.DistributedSum`.
    rotate : bool
        Apply a public rotation first, so that single large coordinates need less range.

    Raises
    ------
    ConfigError
        For a value out of range; the mechanism checks them together with the number of clients.

    Examples
    --------
    >>> ShareSettings(clip=1.0, tolerated=2).honest
    1.0
    """

    clip: Positive
    tolerated: Annotated[int, Int()] = 0
    honest: AboveZero = 1.0
    threshold: Annotated[int, Int()] = 1
    scale: Annotated[int, Int()] = 0
    rotate: Switch = False


@dataclass(frozen=True, kw_only=True)
class VoteSettings(Configured):
    """Settings of the teachers' votes, and of the generator's step.

    Parameters
    ----------
    k : int
        Votes of a teacher per image; all pixels if there are fewer.
    images : int
        B, generated images of a round.
    eta : float
        Length of a target's step per pixel.
    beta : float
        Threshold, as a fraction of the expected number of teachers.
    saturation : float, optional
        Magnitudes above it vote with certainty (the published code's max_grad).
    stochastic : bool
        False casts the plain signs.

    Raises
    ------
    ConfigError
        For a value out of range.
    """

    k: Annotated[int, Int(1)]
    images: Annotated[int, Int(1)] = 15
    eta: Positive = 1e-3
    beta: NotNegative = 0.2
    saturation: Annotated[float | None, Maybe(Real(above=0.0))] = None
    stochastic: Switch = True


@dataclass(frozen=True, kw_only=True)
class TeacherSettings(Configured):
    """Number of teachers per client, and their training.

    Parameters
    ----------
    teachers : int
        Teachers per client. With more than one, the protected unit is a teacher's part of the records, not a client.
    teacher_lr, decay : float
        Step size of the discriminators' Adam, and the decay rate of its first moment, in [0, 1).
    pretrain, steps : int
        Discriminator steps before a client's first votes, beside the ``steps`` before each of its votes.
    batch : int
        Records of a discriminator's step.
    send : {"generator", "images"}
        What the server sends. With the generator's weights, teachers generate training images for their own records'
        labels, as the published code does; with images, they train on the images that they vote on.

    Raises
    ------
    ConfigError
        For a value out of range.
    """

    teachers: Annotated[int, Int(1)] = 1
    teacher_lr: Positive = 1e-3
    decay: BelowOne = 0.5
    pretrain: Annotated[int, Int()] = 10
    steps: Annotated[int, Int()] = 2
    batch: Annotated[int, Int(1)] = 30
    send: Annotated[str, OneOf(*SENDS)] = "generator"
