"""Coded rounds over Flower's messages: with :class:`CodedFedAvg`, a client may vanish once it has shared its update.

The programs are :mod:`fedcomp.systems.coded.relay` and :mod:`fedcomp.systems.coded.sums`; this says around what they
stand, and what a report says of them.
"""

from __future__ import annotations

from typing import Any, Final

from flwr.serverapp.strategy import Strategy

from fedcomp.codecs import Identity
from fedcomp.errors import ConfigError, require_installed
from fedcomp.flower.logs import log
from fedcomp.program import Now, Step, System
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.coded.report import CodingReport
from fedcomp.strategies.coded.settings import GRADIENT_CODE, CodedSettings, NoOptions, SumOptions, require_may_be_coded
from fedcomp.strategies.compressed import Compressed
from fedcomp.strategies.means import MEANS, is_mean, weight_key_of
from fedcomp.strategies.server import Running, Server
from fedcomp.strategies.wrapping import require_inner
from fedcomp.systems.coded.relay import CodedRelay
from fedcomp.systems.coded.sums import CodedSum

_COUNTED: Final = (
    *("planned", "relays", "symbols", "shards", "threshold"),
    *("received", "innovative", "dependent", "waves", "asked", "recollects"),
)
"""Figures that a program tells of its round."""


class CodedServer(Server):
    """Runs a coded system, and reports on it."""

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        outcome = super()._take(x, now, step)
        told, section = now.told.get("coded", {}), x.report.section(CodingReport)
        for name in _COUNTED:
            setattr(section, name, told.get(name, 0))
        made = () if step is None or outcome[0] is None else step.consumed
        section.partitions = sorted(set(made).intersection(now.keys))
        section.included = [x.addresses[node] for node in section.partitions]
        for node, address in x.addresses.items():
            reason = x.report.refused.get(address) or told.get("left_out", {}).get(node, "")
            if node in made and node not in now.keys:
                section.direct[address] = reason or "its app does not take part in coded rounds"
            elif node not in made:
                section.exclude(address, reason or "the round came to nothing")
        return outcome


class CodedFedAvg(CodedServer):
    """Code the clients' replies, so that a client may vanish once it has shared its reply.

    Parameters
    ----------
    inner : Strategy
        Any Flower strategy that works through hooks, usually :class:`fedcomp.strategies.compressed.Compressed`.
    **settings
        See :class:`fedcomp.strategies.coded.settings.CodedSettings`; and what only the chosen construction has:
        :class:`~fedcomp.strategies.coded.settings.SumOptions`; the construction "gradcode" is
        :class:`~fedcomp.strategies.coded.gradients.GradientCoded`, with settings of its own.

    Attributes
    ----------
    settings : CodedSettings

    Raises
    ------
    ConfigError
        For anything that cannot work.
    MissingExtra
        For a sum, where galois, which decodes it, is not installed.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedcomp.codecs import TopK
    >>> from fedcomp.strategies.compressed import Compressed
    >>> strategy = CodedFedAvg(Compressed(FedAvg(), TopK(density=0.01)), code="mds", symbols=7)
    """

    def __new__(cls, *args: Any, **settings: Any) -> Any:
        if settings.get("construction") != GRADIENT_CODE:
            return super().__new__(cls)
        # numpy's solvers, which the others do without.
        from fedcomp.strategies.coded.gradients import GradientCoded

        inner = args[0] if args else settings.pop("inner")
        return GradientCoded(inner, CodedSettings.of(settings))

    def __init__(self, inner: Strategy, **settings: Any) -> None:
        require_inner(inner, "CodedFedAvg")
        given = self.settings = CodedSettings.of(settings)
        require_may_be_coded(inner, given.construction)
        if given.construction == "sumcode":
            system, pair = _summed(inner, given)
        else:
            given.own(NoOptions)
            pair = inner if isinstance(inner, Compressed) else Compressed(inner, Identity())
            system = CodedRelay(inner=pair.system, code=given.code, **given.of_code())
        around = {**pair.surroundings, "seed": pair.seed or given.seed}
        super().__init__(system, pair.inner, links=given.links(), **around)

    def summary(self) -> None:
        """Log the construction, then the inner strategy's own summary."""
        log.info("\t├──> Coded: %r, transport %s", self.system, self.settings.transport)
        self.inner.summary()


def _summed(inner: Strategy, given: CodedSettings) -> tuple[System, Compressed]:
    """Return the coded sum of what a pair sends, and the pair."""
    require_installed("decoding a sum", "galois")
    own = given.own(SumOptions)
    if not isinstance(inner, Compressed):
        raise ConfigError(
            f"a coded sum adds integers, {type(inner).__name__} sends floating-point models; wrap it: "
            f"Compressed({type(inner).__name__}(...), FixedPoint(RandomK(1.0), clip=...))"
        )
    if inner.guard is not None:
        raise ConfigError(f"{inner.guard!r} checks single updates, which a coded sum does not show; leave guard out")
    if not is_mean(inner.inner):
        raise ConfigError(
            f"{type(inner.inner).__name__} looks at single updates, which a coded sum does not show; use one of "
            f"{', '.join(MEANS)}"
        )
    weight = weight_key_of(inner.inner) if own.weighted else None
    system = CodedSum(
        codec=inner.codec,
        mode=own.mode,
        weight=weight or "",
        max_weight=own.max_weight,
        metrics=own.metrics,
        min_contributors=own.min_contributors,
        **given.of_code(),
    )
    return system, inner
