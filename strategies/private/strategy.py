"""Private rules as Flower strategies: around a weighted mean, inside a compressed pair or alone.

``Compressed(DpFedAvg(FedAvg(fraction_evaluate=0.0), clip=1.0, noise_multiplier=1.0), TopK(density=0.01))`` is the
drop-in pair with a promise. What becomes of updates, and in which order, is the rule's
(:mod:`fedcomp.systems.private.rule`); here nodes are shown to the inner strategy, messages say that they are private,
and the inner strategy gets one reply, the noisy mean, so that FedAdam and the others make their step from it.

What is never used: the numbers of examples clients report, metrics, and buffers that travel as values (integers,
running statistics): those keep the server's values. A round without contributions still releases its noise, which is
charged to the budget: that nobody came is not public.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedcomp.codecs import Codec, Identity
from fedcomp.errors import ConfigError
from fedcomp.flower.checkpoint import INNER
from fedcomp.flower.logs import log
from fedcomp.flower.privacy import PRIVATE, SECRET, UNPADDED
from fedcomp.flower.records import to_arrays
from fedcomp.flower.report import Report, Reports
from fedcomp.layout import Layout
from fedcomp.program import Ask, Given, Now, Released, Step, System
from fedcomp.stateful import Stateful, nested
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.inbox import Inbox, SecretInbox
from fedcomp.strategies.means import MEANS, is_mean
from fedcomp.strategies.nodes import NodesShown, asked_for, muted, online
from fedcomp.strategies.private.promise import NoClientEvaluation, Once
from fedcomp.strategies.replies import SentMessage
from fedcomp.strategies.round_log import RoundLog
from fedcomp.strategies.running import Running
from fedcomp.strategies.server import Server
from fedcomp.strategies.update_rules import ReleasedLayout, UpdateRule
from fedcomp.systems.pair import Pair
from fedcomp.systems.private.books import NOT_COVERED
from fedcomp.systems.private.rule import Contribution, Private
from fedcomp.wire import FILLED

__all__ = ["NOT_COVERED", "Contribution", "Outcome", "PrivateStrategy"]


class PrivateStrategy(NoClientEvaluation, Private, Strategy, Stateful):
    """A weighted mean whose every model is released under client-level differential privacy.

    By itself its clients answer with whole models.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means, made with ``fraction_evaluate=0.0``. Its ``fraction_train`` stays at 1: who
        takes part is decided by ``sampling``.
    **promise
        As :class:`fedcomp.systems.private.rule.Private`.

    Attributes
    ----------
    reports : Reports
        Per round: who was asked, what arrived, what was refused and why. For the server, not for release.

    Raises
    ------
    ConfigError
        For arguments that cannot keep the promise.
    """

    STATE: ClassVar[Mapping[str, Any]] = {
        "privacy": nested("privacy"),
        "inner": INNER,
        "reports": Reports,
        "exhausted": str,
    }

    takes_plain: ClassVar[bool] = True
    """Whether the dense reply of a client without the mod may be added."""

    bounds_updates: ClassVar[bool] = True
    """Whether the sum bounds what a client adds to it, whatever that sends. Then reports name no norms and no guard is
    taken: who is refused for what others sent would break the bound on its influence. False where clients bound and
    noise their updates themselves: the promise is kept by then, but nothing here stops one that does not."""

    generator: Any = None
    """What the system that clients take part in is brought on the server: :attr:`fedcomp.program.Now.data`."""

    encoding: Codec = Identity()
    """What is used as the codec where clients answer with whole models."""

    def __init__(self, inner: Strategy, **promise: Any) -> None:
        if not isinstance(inner, Strategy) or not is_mean(inner):
            raise ConfigError(
                f"{type(inner).__name__} looks at single updates, which a private sum does not show; use one of "
                f"{', '.join(MEANS)}. A codec goes outside: Compressed({type(self).__name__}(...), codec)"
            )
        if getattr(inner, "fraction_evaluate", 0.0) != 0.0:
            raise ConfigError(
                "evaluation on clients would release their metrics without noise; make the inner strategy with "
                "fraction_evaluate=0.0, and evaluate on the server (evaluate_fn)"
            )
        if getattr(inner, "fraction_train", 1.0) != 1.0:
            raise ConfigError(
                f"fraction_train={inner.fraction_train!r} of the inner strategy "  # type: ignore[attr-defined]
                "samples clients without accounting; leave it at 1.0 and give sampling=Sampling(...)"
            )
        super().__init__(**promise)
        self.inner = inner
        self.reports = Reports()
        self._once = Once(type(self).__name__)
        self._log = RoundLog(type(self).__name__)
        self._released: ReleasedLayout | None = None
        # In a tuple: a strategy in an attribute is taken for one that this one stands around.
        self._alone: tuple[Alone, ...] = ()

    def update_rule(self) -> PrivateRule:
        """Return what this strategy needs of a round's updates: each alone, bounded."""
        return PrivateRule(self)

    def within(self, released: ReleasedLayout) -> None:
        """Learn what surrounding compression sends of an update."""
        self._released = released

    def may_be_coded(self, construction: str) -> bool:
        """Whether other clients may hold what a client sends, as those of a coded round's construction do."""
        return False

    def summary(self) -> None:
        """Log what is promised, then the inner strategy's own summary."""
        log.info(
            "\t├──> %s: noise multiplier %g (%s), %s, %s",
            type(self).__name__,
            self.noise_multiplier,
            self.noise,
            self.adjacency,
            self.describe(),
        )
        self.inner.summary()

    def adopt(self, arrays: ArrayRecord, layout: Layout | None = None) -> None:
        """Take the model of the round to come, and the layout of what is released; default the model's own."""
        self._layout = Layout.of(to_arrays(arrays)) if layout is None else layout
        if not self._layout.size:
            raise ConfigError(
                "the model has no tensor of finite floats, and only those are released: integers, buffers and "
                "statistics stay as they are. Add parameters, or train without privacy"
            )

    def ask(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Draw the nodes of a round and let the inner strategy ask them; nobody when the run is over.

        Raises
        ------
        ConfigError
            When dense replies, which this would be answered with, are not what this strategy takes, and when messages
            hold more than the model.
        """
        if not self.takes_plain and self._released is None:
            raise ConfigError(
                f"{type(self).__name__} takes only updates that its clients' codec privatised: it belongs inside "
                "Compressed, as local_dp(...) and DistributedDp(...) do"
            )
        # What is released may be less than the model (a support that all share, kept coordinates): noise and price are
        # for that.
        self.adopt(arrays, None if self._released is None else self._released(arrays, server_round))
        assert self._layout is not None

        def there() -> list[int]:
            nodes = online(grid, self.inner)
            for why in self.surplus(nodes):
                self._once.warn(why)
            return nodes

        chosen, reason = self.draw(there, self._layout, server_round)
        if reason:
            self._once.warn(reason, f"no client is asked in round {server_round}: {reason}")
            return []
        config[PRIVATE] = True
        if not self.pad:
            config[UNPADDED] = True
        if self.withholds:
            config[SECRET] = True
        # Flower's strategies sample among the nodes they see: they see those that were drawn, and ask all of them.
        with asked_for(self.inner, len(chosen)), muted(self.withholds):
            shown = NodesShown(grid, lambda: chosen)
            messages = list(self.inner.configure_train(server_round, arrays, config, shown))
        # The messages are made and not sent.
        self.open(server_round, chosen)
        # Messages of a round share their content.
        for record in {id(m.content): m.content for m in messages}.values():
            if len(record.array_records) > 1:
                raise ConfigError(
                    f"messages of {type(self).__name__} hold {len(record.array_records)} ArrayRecords "
                    f"{sorted(record.array_records)}; a private round exchanges the model and nothing else"
                )
        return messages

    def begins(self, report: Report, codec: Codec, layout: Layout, *, framed: bool = True) -> bool:
        """Close the round of a report, which is this strategy's, too; return whether it was open."""
        if not self.close(report.round):
            return False
        self.reports[report.round] = report
        if kept := [t.name for t in layout.exact]:
            note = (
                f"{len(kept)} tensor(s), first {kept[0]!r}, keep their first values: private rounds send no "
                "statistics, integers and booleans. Models with group or layer normalisation have none"
            )
            # It follows from the model alone. Where who takes part is secret a round's own notes are not logged.
            if self.withholds:
                self._once.warn(note)
            report.notes.append(note)
        # Dense models are equally long by themselves, and no length tells of an update that its client noised.
        if self.pad and framed and self.bounds_updates and (longest := codec.longest(layout)) is not None:
            report.padded_bytes = longest + FILLED
        return True

    def restored(self) -> None:
        """Let what stands in no pair report where this does from here on."""
        super().restored()
        # Of who was online when the state was saved: others may be there now, who have turns left.
        self.exhausted = ""
        for alone in self._alone:
            alone.reports = self.reports

    # By itself.

    def program(self) -> System | None:
        """Return the system that clients take part in where this stands in no pair; None: they answer with models."""
        return None

    @property
    def alone(self) -> Alone:
        """The rounds of this strategy where it stands in no pair."""
        if not self._alone:
            self._alone = (Alone(self),)
        return self._alone[0]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the nodes that are drawn; see :meth:`ask`."""
        return self.alone.configure_train(server_round, arrays, config, grid)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Release the noisy mean of ordinary dense replies; None and None of a round in which nobody may be."""
        return self.alone.aggregate_train(server_round, replies)

    def aggregate_updates(
        self,
        server_round: int,
        updates: Iterable[tuple[int, NDArray[Any]]],
        layout: Layout,
        *,
        support: NDArray[np.int64] | None = None,
    ) -> Outcome:
        """Release the noisy sum of updates that came as vectors, as audits give them.

        Parameters
        ----------
        updates : iterable of (node id, ndarray of shape (layout.size,))
            Differences to the model, each read and forgotten before the next.
        layout : Layout
            The model's.
        support : int64 array, optional
            Public coordinates outside of which nothing is summed, released or changed, ascending.

        Returns
        -------
        (ArrayRecord or None, MetricRecord or None)
            None and None when the round was not begun.

        Raises
        ------
        BudgetExceeded, PrivacyLedgerError
            Nothing was released.
        """
        return self.alone.summed(server_round, updates, layout, support)


class PrivateRule(UpdateRule):
    """What every private strategy needs: the update alone, bounded.

    Parameters
    ----------
    strategy : PrivateStrategy
    framed : bool
        Whether clients send frames, and not models.
    """

    inbox: ClassVar[type[Inbox]] = SecretInbox
    not_finite: ClassVar[str] = (
        "the noisy mean is not finite in the model's precision; the budget is charged, and the model is kept. Use a "
        "wider dtype, a smaller clip norm or less noise"
    )
    kind: ClassVar[type] = Released
    strategy: PrivateStrategy

    def __init__(self, strategy: PrivateStrategy, *, framed: bool = True) -> None:
        super().__init__(strategy)
        self._framed = framed
        self.takes_plain = strategy.takes_plain
        self.measured = not strategy.bounds_updates

    @property
    def bounded(self) -> bool:
        """Whether the sum bounds what a client adds to it, whatever that sends."""
        return self.strategy.bounds_updates

    @property
    def withholds(self) -> bool:
        """Whether what a round costs rests on nobody knowing who took part."""
        return self.strategy.withholds

    @property
    def takes(self) -> Strategy:
        """The weighted mean inside, which gets the noisy one."""
        return self.strategy.inner

    def check(self, codec: Codec, guard: Norms | None) -> None:
        """Refuse what the strategy cannot keep its promise with."""
        super().check(codec, guard)
        self.strategy.check_codec(codec)

    def within(self, released: ReleasedLayout) -> None:
        """Tell the strategy of what noise is needed: of what is sent alone."""
        self.strategy.within(released)

    def configure(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> list[Message]:
        """Draw who is asked."""
        return self.strategy.ask(server_round, arrays, config, grid)

    def total(self, x: Running, now: Now, codec: Codec, given: Sequence[Given], *, raw: bool = False) -> Step | None:
        """Return the noisy mean; nodes are charged by their addresses, since a partition is a client's word."""
        if not self.strategy.begins(x.report, codec, x.layout, framed=self._framed):
            return None
        return self.strategy.noisy(now, codec, given, unit=x.addresses.__getitem__)


class Alone(Server):
    """The rounds of a private strategy that stands in no pair.

    Without a system of its own messages are the inner strategy's, and clients answer with models.

    Parameters
    ----------
    strategy : PrivateStrategy
    """

    by_hooks: ClassVar[bool] = True

    def __init__(self, strategy: PrivateStrategy) -> None:
        self._asked: tuple[Running, Now] | None = None
        program = strategy.program()
        self._bare = program is None
        super().__init__(program or Pair(strategy.encoding), strategy, seed=strategy.seed)
        self._name, self._log, self.reports = type(strategy).__name__, strategy._log, strategy.reports
        self._rule = PrivateRule(strategy, framed=False)

    def _ask(self, server_round: int, arrays: ArrayRecord, messages: Sequence[Message]) -> tuple[Running, Now]:
        self._asked = super()._ask(server_round, arrays, messages)
        return self._asked

    def _now(self, x: Running, *args: Any, **more: Any) -> Now:
        return super()._now(x, *args, data=self._rule.strategy.generator, **more)

    def _message(self, x: Running, now: Now, ask: Ask, sequence: int) -> SentMessage:
        if not self._bare:
            return super()._message(x, now, ask, sequence)
        return SentMessage(x.base[ask.node], x.addresses[ask.node], sequence)

    def _close(self, x: Running, now: Now, step: Step | None) -> Outcome:
        if step is None and not x.report.asked:
            # The run is over, which was said once; there is nothing to report.
            del self.reports[x.report.round]
            return None, None
        return super()._close(x, now, step)

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        outcome = super()._take(x, now, step)
        if self._bare:
            # Whole models are what clients were asked for.
            x.report.without_mod.clear()
        return outcome

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Drive the round to its end; None and None of one that was not configured."""
        return super().aggregate_train(server_round, replies) if server_round in self._open else (None, None)

    def summed(
        self,
        server_round: int,
        updates: Iterable[tuple[int, NDArray[Any]]],
        layout: Layout,
        support: NDArray[np.int64] | None,
    ) -> Outcome:
        """Return what updates that came as vectors make of the model; see :meth:`PrivateStrategy.aggregate_updates`."""
        strategy, asked = self._rule.strategy, self._asked
        if asked is None or not asked[0].base or asked[0].report.round != server_round:
            # Of a round that nobody was drawn for everything is done.
            return self.aggregate_train(server_round, ())
        x, now = asked
        if not strategy.begins(x.report, self.system.codecs[0], layout, framed=False):
            return None, None
        self._open.pop(server_round)[0].close()
        reads = ((node, node, _reading(update)) for node, update in updates)
        # Of clients' values: what overflows is refused later, as not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            step = strategy.release(server_round, layout, support, reads, x.report.refuse)
        outcome = self._take(x, now, None if step is None else replace(step, consumed=()))
        for note in x.report.notes:
            log.warning("%s, round %d: %s", self._name, server_round, note)
        return outcome


def _reading(update: NDArray[Any]) -> Callable[[], NDArray[Any]]:
    return lambda: update
