"""Strategies around other strategies: what the outer one reads of the inner one, and how the inner loop runs.

Flower's ``Strategy.start`` is a loop over four hooks. Applications override it, to save models or to report to a
dashboard each round; what they call in it are still the hooks. So a wrapper lets the inner strategy run its loop and
takes the place of its hooks.
"""

from __future__ import annotations

from typing import Any, Final

from flwr.serverapp import strategy as flowers
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, Strategy

from fedcomp.errors import ConfigError
from fedcomp.flower.rounds import ExchangeStrategy

_LEGACY: Final = "flwr.server.strategy"

_HOOKS: Final = ("summary", "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")


def require_inner(inner: object, outer: str) -> None:
    """Refuse what cannot stand inside of the strategy ``outer``.

    Raises
    ------
    ConfigError
        For something that is no Flower strategy, one of Flower's legacy API, one whose rounds are not made by the
        hooks, and one that exchanges trees instead of updates.
    """
    if isinstance(inner, Strategy):
        for found in held(inner):
            if isinstance(found, ExchangeStrategy) and not found.by_hooks:
                raise ConfigError(
                    f"{type(found).__name__} runs its own exchanges and has no hooks that {outer} could wrap; run it "
                    "alone"
                )
            if isinstance(found, FedXgbBagging | FedXgbCyclic):
                raise ConfigError(
                    f"{type(found).__name__} exchanges the bytes of boosted trees, which cannot be compressed or "
                    f"added; run it without {outer}"
                )
        return
    if isinstance(inner, type):
        raise ConfigError(
            f"inner is the class {inner.__name__}; expected a Flower Strategy instance: write {inner.__name__}(...)"
        )
    legacy = next((base.__name__ for base in type(inner).__mro__ if base.__module__.startswith(_LEGACY)), "")
    if legacy:
        # Most strategies have kept their names in the new API.
        known = legacy if hasattr(flowers, legacy) else "FedAvg"
        raise ConfigError(
            f"{type(inner).__name__} is a strategy of Flower's legacy API ({_LEGACY}), whose apps exchange no "
            f"Messages. Write 'from flwr.serverapp.strategy import {known}', and a ServerApp with @app.main()"
        )
    raise ConfigError(f"inner must be a Flower Strategy instance, got {inner!r}")


def require_uncompressed(inner: object) -> None:
    """Refuse a strategy that compresses already, or holds one that does.

    Raises
    ------
    ConfigError
    """
    if isinstance(inner, Strategy) and any(getattr(type(found), "by_hooks", False) for found in held(inner)):
        raise ConfigError(
            f"{type(inner).__name__} already compresses, and frames are not compressed again; put one of the "
            "two around the strategy, with chain(...) for several steps and downlink= for the other direction"
        )


def held(strategy: Strategy) -> list[Strategy]:
    """Return a strategy and those it holds in its attributes, each once."""
    found = [strategy]
    # The list grows under the loop, so that what is held by what is held is found as well.
    for each in found:
        inside = [value for value in vars(each).values() if isinstance(value, Strategy)]
        found += [value for value in inside if all(value is not known for known in found)]
    return found


def loop_of(inner: Strategy, outer: Strategy) -> Strategy:
    """Return a strategy that starts as ``inner`` does and in whose loop ``outer`` takes the place of the hooks.

    It shares all attributes with ``inner``, in both directions, so that what the loop keeps is found there. Only the
    hooks differ, and only for the loop: ``outer`` may call those of ``inner``. A hook that the loop sets itself, around
    the one it found, stands for the loop alone: in ``inner`` it would be called by ``outer``, which it calls.
    """
    replaced: dict[str, Any] = {}

    def hook(name: str) -> property:
        # A property also stands before a hook that was put into the instance.
        return property(
            lambda _: replaced[name] if name in replaced else getattr(outer, name),
            lambda _, value: replaced.__setitem__(name, value),
            lambda _: replaced.pop(name),
        )

    kind = type(inner)
    looped: Any = type(kind.__name__, (kind,), {name: hook(name) for name in _HOOKS})
    # Not by the constructor, whose arguments nobody knows here; the attributes are all there is to take over.
    runner: Strategy = object.__new__(looped)
    runner.__dict__ = inner.__dict__
    return runner
