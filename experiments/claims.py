"""Claims: named checks with a measured value, a bound, and where the bound comes from."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

_OPS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


@dataclass(frozen=True)
class Claim:
    """``value op bound`` must hold. ``source`` says where the bound comes from: a paper, theory, a measurement.

    ``gate=False`` marks a goal that is reported but does not fail the run (for instance a throughput that depends on
    how busy the machine is); the document still shows whether it held.
    """

    name: str
    value: float
    op: str
    bound: float
    source: str
    gate: bool = True

    def __post_init__(self) -> None:
        if self.op not in _OPS:
            raise ValueError(f"claim {self.name!r}: unknown comparison {self.op!r}; use one of {sorted(_OPS)}")

    @property
    def ok(self) -> bool:
        """Whether the measured value satisfies the bound. NaN never does."""
        return not math.isnan(self.value) and bool(_OPS[self.op](self.value, self.bound))

    def to_json(self) -> dict[str, Any]:
        """Return the claim as a JSON-able dictionary."""
        return {
            "name": self.name,
            "value": self.value,
            "bound": self.bound,
            "op": self.op,
            "ok": self.ok,
            "gate": self.gate,
            "source": self.source,
        }
