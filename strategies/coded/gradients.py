"""Gradient codes over Flower's messages: :class:`~fedcomp.systems.coded.gradients.GradientCode` around a mean."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Final

from flwr.serverapp.strategy import Strategy

from fedcomp.errors import ConfigError, require_installed
from fedcomp.program import Now, Step
from fedcomp.strategies.adaptive import Outcome
from fedcomp.strategies.coded.report import CodingReport
from fedcomp.strategies.coded.settings import GRADIENT_CODE, CodedSettings, require_may_be_coded
from fedcomp.strategies.means import MEANS, is_mean, weight_key_of
from fedcomp.strategies.server import Running, Server
from fedcomp.systems.coded.gradients import GradientCode

_SHARED: Final = ("construction", "collect_timeout", "seed", "options")
"""Settings that mean something here; all others are of constructions in which clients hand shards to each other."""

_OWN: Final = ("losses", "scheme", "arithmetic", "limit", "approximate", "quorum")
"""Options of the system that a caller may give; the others follow from the inner strategy and the settings."""


class GradientCoded(Server):
    """What ``CodedFedAvg(inner, construction="gradcode")`` returns.

    Parameters
    ----------
    inner : Strategy
        One of Flower's weighted means; it takes the decoded mean in one step.
    settings : CodedSettings
        Its options are ``losses``, ``scheme``, ``arithmetic``, ``limit``, ``approximate`` and ``quorum`` as of
        :class:`~fedcomp.systems.coded.gradients.GradientCode`, with ``collect_timeout`` and ``seed`` of
        :class:`~fedcomp.strategies.coded.settings.CodedSettings`.

    Raises
    ------
    ConfigError
        For anything that cannot work.
    MissingExtra
        For an arithmetic of a field, where galois, which decodes it, is not installed.
    """

    def __init__(self, inner: Strategy, settings: CodedSettings) -> None:
        for each in fields(settings):
            if each.name not in _SHARED and (value := getattr(settings, each.name)) != each.default:
                raise ConfigError(
                    f"{each.name}={value!r} has no effect in a gradient code: leave it out, and use losses= for the "
                    "number of clients that may be lost"
                )
        require_may_be_coded(inner, GRADIENT_CODE)
        alone = inner.inner if isinstance(inner, Server) else inner
        if not is_mean(alone):
            raise ConfigError(
                f"{type(alone).__name__} looks at single updates, which a gradient code does not show; use one of "
                f"{', '.join(MEANS)}"
            )
        if alone is not inner:
            raise ConfigError(
                "gradient coding adds up updates before they are sent, and a combination of compressed updates is as "
                f"long as any: put {type(alone).__name__} itself into CodedFedAvg, without Compressed"
            )
        seconds = None if settings.collect_timeout == float("inf") else settings.collect_timeout
        own = settings.among(_OWN)
        system = GradientCode(**own, seconds=seconds, weight=weight_key_of(inner) or "")
        if system.arithmetic != "float64":
            require_installed("decoding over a prime field", "galois")
        super().__init__(system, inner, seed=settings.seed)
        self.settings = settings

    def _now(self, x: Running, *args: Any, **more: Any) -> Now:
        now = super()._now(x, *args, **more)
        # Those of the former code that no node holds any more.
        now.state["away"] = sorted(set(now.state.get("devices", ())) - set(self.roster.claims.values()))
        return now

    def _take(self, x: Running, now: Now, step: Step | None) -> Outcome:
        outcome = super()._take(x, now, step)
        told, section = now.told.get("coded", {}), x.report.section(CodingReport)
        section.planned = section.shards = told.get("planned", 0)
        section.symbols, section.asked = told.get("symbols", 0), told.get("asked", 0)
        section.received, section.innovative = told.get("received", 0), told.get("innovative", 0)
        section.dependent = section.received - section.innovative
        section.residual = told.get("residual", 0.0)
        section.count("hub_up", told.get("bytes", 0))
        included = told.get("included", []) if outcome[0] is not None else []
        section.partitions, section.included = included, [x.addresses[node] for node in included]
        for node, address in x.addresses.items():
            if node in included:
                continue
            if node in told.get("left_out", ()):
                section.exclude(address, "no client that holds its partition answered")
            elif reason := now.told.get("skipped", ""):
                section.exclude(address, f"round skipped: {reason}")
            elif address in x.report.refused:
                section.exclude(address, f"not in the code of this round: {x.report.refused[address]}")
        return outcome
