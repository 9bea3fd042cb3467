"""Forward gradients over Flower's messages: :class:`fedcomp.systems.forward.Forward` around any inner strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Replay
from fedcomp.errors import ConfigError
from fedcomp.flower.privacy import find_private
from fedcomp.flower.report import ReportSection, figure
from fedcomp.layout import NONE_DENSE
from fedcomp.program import Now, Step
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.guard import Norms
from fedcomp.strategies.parts import PLAIN_PREFIXES, Settings, make_inner
from fedcomp.strategies.private.flower_dp import promises
from fedcomp.strategies.server import Running, Server
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
    """

    step: float = figure()
    signs: int = figure()
    left_out: int = figure(unit="slopes")
    cut: int = figure(unit="slopes")

    def line(self) -> str:
        """Return the step, and what was left out."""
        counts = {"slopes not finite": self.left_out, "slopes cut": self.cut}
        return ", ".join([f"step {self.step:.3g}", *(f"{count} {what}" for what, count in counts.items() if count)])


class ForwardGradients(Server):
    """Forward gradients: average gradient estimates from a few numbers per client, and broadcast these numbers.

    The clients' apps need :func:`fedcomp.clients.forward.forward_gradients`; replies of others are refused.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy with hooks; its update is the mean of the clients' steps. Under FedAvg the server broadcasts
        the numbers of all clients in place of the model. The step of another strategy (momentum, Adam, a median) is not
        their sum, so the whole model is sent.
    directions, lr, lr_scale, scope, shared, clip, replay, most_signs
        As of :class:`fedcomp.systems.forward.Forward`.
    record, guard, seed
        As of :class:`~fedcomp.strategies.server.Server`.

    Raises
    ------
    ConfigError
        For private strategies, because slopes are not a bounded update; and in the first round, if the directions cost
        too much.

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
                f"{type(inner).__name__} promises privacy by clipping and noising updates, but slopes are neither "
                "clipped nor noised. Use a codec without forward gradients"
            )
        system = Forward(directions, lr, lr_scale, scope, shared, clip, replay, most_signs)
        self.codec = system.codec
        # No tensor travels beside the directions: nobody differentiates the small ones.
        super().__init__(
            system,
            inner,
            downlink=Replay(system.codec) if replay else None,
            policy=NONE_DENSE,
            record=record,
            guard=guard,
            seed=seed,
        )

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        section, measured = x.report.section(Slopes), now.told["measured"]
        section.step, section.signs = measured["step"], measured["signs"]
        section.left_out, section.cut = measured["left_out"], measured["cut"]
        return super()._take(x, now, step)


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
