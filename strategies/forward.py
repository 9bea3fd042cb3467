"""Forward gradients: clients measure how the loss changes along random directions, and send these numbers alone.

m numbers come up from each client whatever the size of the model, and what goes down are the numbers of all. The price
is variance: the estimate's squared error is (p - 1) / (m C) times the gradient's squared length, for p parameters and
C clients with directions of their own, and the step has to be smaller by as much.

Weight directions: BAFFLE (arXiv:2301.12195), Spry (NeurIPS 2024), FedKSeed (arXiv:2312.06353), of which abstracts and
code were read; the replay, the step and the clip as they are here are derived. Ren, Kornblith, Liao, Hinton ("Scaling
forward gradient with local losses", ICLR 2023; abstract and configuration read) perturb activities, not weights:
that estimate takes the inputs of each layer, which no server has (:mod:`fedcomp.forward.activity`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Replay
from fedcomp.errors import ConfigError
from fedcomp.flower.forward import Measure, Measured
from fedcomp.flower.logs import log
from fedcomp.flower.privacy import find_private
from fedcomp.flower.protocol import app_failure
from fedcomp.flower.report import ReportSection, figure
from fedcomp.flower.schema import SchemaError
from fedcomp.layout import NONE_DENSE
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.parts import PLAIN_PREFIXES, Settings, make_inner
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.replies import SentMessage, first_replies
from fedcomp.strategies.system import System, arguments, settings_of
from fedcomp.systems.forward import Forward


@dataclass
class Slopes(ReportSection, name="forward"):
    """What a round of forward gradients adds to a report.

    Attributes
    ----------
    step : float
        The step that clients took of their slopes.
    signs : int
        Signs that the server drew to add what came.
    left_out : int
        Slopes that were not finite, of all clients.
    cut : int
        Slopes that the clip made smaller.
    unmeasured : list of int
        Nodes that did something else, and are not in the mean: their apps lack the half.
    """

    step: float = figure()
    signs: int = figure()
    left_out: int = figure(unit="slopes")
    cut: int = figure(unit="slopes")
    unmeasured: list[int] = figure(list, unit="nodes", show="count")

    def line(self) -> str:
        """Return the step, and what was left out."""
        counts = {
            "slopes not finite": self.left_out,
            "slopes cut": self.cut,
            "nodes did not measure": len(self.unmeasured),
        }
        return ", ".join([f"step {self.step:.3g}", *(f"{count} {what}" for what, count in counts.items() if count)])


class ForwardGradients(Compressed):
    """Average estimates of gradients that clients make of few numbers, and send these numbers on.

    The clients need the half :func:`fedcomp.clients.forward.forward_gradients`; replies of others are refused.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy with hooks; the mean of the clients' steps is its update. Under a weighted mean the
        numbers of all clients go down in place of the model; the step of another server (momentum, Adam) is not
        their sum, and the model goes down whole.
    directions : int
        m, of each client and round, for each stretch.
    lr : float
        Step size, as for exact gradients.
    lr_scale : float, optional
        Factor of the step size. Default: m C / (m C + n - 1) for C clients and the n coordinates of the longest
        stretch, by which the largest stable step falls (:func:`fedcomp.forward.directions.step_scale`).
    scope : {"global", "layer"}
        One set of directions for the whole model, or one for each tensor: as many times the numbers and passes, and
        less variance.
    shared : bool
        The same directions for all clients.
    clip : float
        Largest magnitude of a slope; 0 for none.
    replay : bool
        Send the round's numbers down in place of the model, where that is shorter.
    most_signs : int
        Signs that the server may have to draw in a round; more are refused before the first message.
    guard, record, seed
        As in :class:`Compressed`.

    Raises
    ------
    ConfigError
        For private strategies: slopes are no bounded update. In the first round, when the directions cost too much.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = ForwardGradients(FedAvg(), directions=32, lr=0.5)
    >>> strategy.codec.directions
    32
    """

    def __init__(
        self,
        inner: Strategy,
        directions: int = 32,
        *,
        lr: float = 0.1,
        lr_scale: float | None = None,
        scope: str = "global",
        shared: bool = False,
        clip: float = 0.0,
        replay: bool = True,
        most_signs: int = 10**12,
        guard: Norms | None = None,
        record: str | None = None,
        seed: int = 0,
    ) -> None:
        if find_private(inner) is not None or promises(inner):
            raise ConfigError(
                f"{type(inner).__name__} keeps a promise of privacy, for which updates are bounded and noised; slopes "
                "are neither. Use a codec without forward gradients"
            )
        self.system = Forward(directions, lr, lr_scale, scope, shared, clip, replay, most_signs)
        codec = self.projection = self.system.codec
        self._told = ""
        down = Replay(codec) if self.system.replay else None
        # No tensor travels beside the directions: nobody differentiates the small ones.
        super().__init__(inner, codec, down, feedback=False, policy=NONE_DENSE, guard=guard, record=record, seed=seed)

    def summary(self) -> None:
        """Log the codec and the step."""
        scale = "m C / (m C + n - 1)" if self.system.lr_scale is None else f"{self.system.lr_scale:g}"
        lr, clip = self.system.lr, self.system.clip
        log.info("\t├──> ForwardGradients: %r, step %g x %s, clip %g", self.codec, lr, scale, clip)
        self.inner.summary()

    def identity(self) -> dict[str, str]:
        """Return the settings, which must not change within a run."""
        return {**super().identity(), "step": f"{self.system.lr} {self.system.lr_scale} {self.system.clip}"}

    def ask(self, server_round: int, arrays: ArrayRecord, messages: list[Message]) -> list[SentMessage]:
        """Return the messages of a training exchange, with what is to be measured.

        Raises
        ------
        ConfigError
            When the signs of a round are too many.
        """
        sent = super().ask(server_round, arrays, messages)
        layout, clients = self.layout, len(sent)
        cost = self.system.cost(layout, clients)
        if cost != self._told:
            self._told = cost
            log.info("forward gradients: %s", cost)
        said = self.reports.join(server_round).section(Slopes)
        said.step = self.system.step(layout, clients)
        order = Measure(server_round, said.step, self.system.clip)
        for each in sent:
            order.put(each.message.content)
        return sent

    def aggregate_exchange(
        self,
        server_round: int,
        sent: Sequence[SentMessage],
        replies: Iterable[Message],
        *,
        scales: Mapping[int, float] | None = None,
        compensation: float = 0.0,
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate what was measured; a reply that was not is refused."""
        said, came = self.reports.join(server_round).section(Slopes), list(replies)
        first = first_replies([each.message for each in sent], came)
        refused: dict[str, Message] = {}
        for each in sent:
            reply = first.get(each.node)
            if reply is None or reply.has_error():
                continue
            name = each.message.metadata.message_id
            try:
                found = Measured.read(reply.content)
            except SchemaError as error:
                refused[name] = app_failure(each.message, str(error))
                continue
            if found is None or found.round != server_round:
                said.unmeasured.append(each.node)
                what = "of another round" if found else "not what was asked for: its app lacks forward_gradients()"
                refused[name] = app_failure(each.message, f"its update is {what}")
                continue
            said.left_out += found.left_out
            said.cut += found.cut
            said.signs += self.projection.signs(self.layout)
        kept = [refused.get(reply.metadata.reply_to_message_id, reply) for reply in came]
        return super().aggregate_exchange(server_round, sent, kept, scales=scales, compensation=compensation)


def _build(settings: Settings, seed: int) -> Strategy:
    own = arguments(ForwardGradients, settings, _OWN)
    return ForwardGradients(make_inner(settings), lr=float(settings["lr"]), seed=seed, **own)


_OWN: Final = ("directions", "lr_scale", "scope", "shared", "clip", "replay")

SYSTEM: Final = System(
    "forward",
    "Forward gradients",
    "BAFFLE (arXiv:2301.12195), and for what goes down FedKSeed (arXiv:2312.06353): abstracts; both as derived here",
    "how far the loss changes along a few random directions, of a batch, without back-propagation",
    _build,
    {**settings_of(ForwardGradients, *_OWN)},
    PLAIN_PREFIXES,
)
