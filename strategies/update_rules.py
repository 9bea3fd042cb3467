"""The updates that a strategy needs from a round: only their mean, each single one, or a rule that it declares.

Flower's own strategies get their rule from :func:`rule_of`, which looks at their aggregation alone; any other strategy
may declare one by a method ``update_rule()``, as private strategies do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Codec
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout
from fedcomp.program import Given, Mean, Now, Single, Step
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.inbox import Inbox
from fedcomp.strategies.means import MEANS, is_mean
from fedcomp.strategies.pairings import warn_of_pairing
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.replies import NOT_FINITE
from fedcomp.strategies.running import Running

ReleasedLayout = Callable[[ArrayRecord, int], Layout]
"""Of a model and a round: the layout of what is sent of an update."""


class UpdateRule(ABC):
    """What a strategy needs of a round's updates.

    Parameters
    ----------
    strategy : Strategy

    Attributes
    ----------
    kind : type
        Among what a system's contributions may become, :attr:`fedcomp.program.System.RULES`.
    inbox : type
        What is read of replies.
    takes_plain : bool
        Whether the whole model of a client that encoded nothing can be used.
    measured : bool
        Whether reports may name the norms of updates.
    bounded : bool
        Whether every update is bounded, so that no guard is taken.
    withholds : bool
        Whether neither log nor reports may say who took part.
    not_finite : str
        What a report says of an aggregate that cannot be a model.
    """

    kind: ClassVar[type] = Mean
    inbox: ClassVar[type[Inbox]] = Inbox
    takes_plain: bool = True
    measured: bool = True
    not_finite: ClassVar[str] = NOT_FINITE

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def bounded(self) -> bool:
        """Whether every update is bounded, so that no guard is taken."""
        return promises(self.strategy)

    @property
    def withholds(self) -> bool:
        """Whether neither log nor reports may say who took part."""
        return False

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Refuse a codec or a guard that does not fit.

        Raises
        ------
        ConfigError
        """
        if guard is not None and self.bounded:
            raise ConfigError(
                f"{type(self.strategy).__name__} bounds every update itself, and a guard would make one client's "
                "contribution to the private sum depend on the others; leave guard out"
            )

    def within(self, released: ReleasedLayout) -> None:  # noqa: B027
        """Learn what surrounding compression sends of an update; default: it does not matter."""

    def of_round(self, *, own: bool) -> UpdateRule:
        """Return the rule of one round; ``own`` where some nodes are sent models of their own."""
        return self

    def configure(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Return the messages by which the strategy asks the clients of a round."""
        return list(self.strategy.configure_train(server_round, arrays, config, grid))

    @property
    def takes(self) -> Strategy:
        """The strategy that is handed what :meth:`total` returns."""
        taker: Strategy = self.strategy
        return taker

    @abstractmethod
    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return what contributions come to; see :meth:`fedcomp.program.Rule.total`."""


@runtime_checkable
class Declares(Protocol):
    """A strategy that says itself what it needs of updates."""

    def update_rule(self) -> UpdateRule:
        """Return the rule."""
        ...


def rule_of(strategy: Strategy) -> UpdateRule:
    """Return what a strategy needs: its own word, a mean for Flower's weighted means, else every reply as arrays."""
    if isinstance(strategy, Declares):
        return strategy.update_rule()
    return MeanRule(strategy) if is_mean(strategy) else RepliesRule(strategy)


class RepliesRule(UpdateRule):
    """Every update as an ordinary reply, which any strategy with Flower's hooks understands."""

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Refuse votes, which are no updates one by one."""
        super().check(codec, guard)
        self._require_updates(codec)
        warn_of_pairing(self.strategy, codec)

    def _require_updates(self, codec: Codec) -> None:
        if codec.votes:
            raise ConfigError(
                f"{codec!r} sends votes, of which only the weighted sum is an update; {type(self.strategy).__name__} "
                f"looks at single updates. Use one of {', '.join(MEANS)}"
            )

    kind: ClassVar[type] = Single

    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return all updates; None where they have no weight.

        Raises
        ------
        ConfigError
            When the codec votes, and some nodes got models of their own, or the strategy was not known to look at
            single updates.
        """
        self._require_updates(codec)
        return None if x.weightless(given) else Single().total(now, codec, given, raw=raw)


class MeanRule(UpdateRule):
    """The weighted mean alone: frames are added to one buffer."""

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Warn of what the codec and the mean spoil for each other."""
        super().check(codec, guard)
        warn_of_pairing(self.strategy, codec)

    def of_round(self, *, own: bool) -> UpdateRule:
        """Return the rule for single updates where models cannot be added as changes of one model, and where an
        ``aggregate_train`` was set on the strategy since, which is to see them."""
        return RepliesRule(self.strategy) if own or not is_mean(self.strategy) else self

    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return the mean; None where nobody has weight."""
        return None if x.weightless(given) else Mean().total(now, codec, given, raw=raw)
