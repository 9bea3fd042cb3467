"""Indoor localisation: the room of a phone from Wi-Fi signal strengths, a small mobile-device task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fedcomp.tasks.base import COMMON_OPTIONS, Classification
from fedcomp.tasks.models import Mlp
from fedcomp.tasks.options import WIDTHS, TaskOption
from fedcomp.tasks.sources import LabelledExamples, load


class Wifi(Classification):
    """2,000 vectors of seven signal strengths in dBm, standardised; four rooms; a fixed fifth is held out.

    Without the file the vectors are drawn from the log-distance path-loss formula (see
    :func:`fedcomp.tasks.synthetic.path_loss`), and the record says so.
    """

    name = "wifi"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **COMMON_OPTIONS,
        "hidden": TaskOption((64,), WIDTHS, "widths of the hidden layers; empty: linear"),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        table, source = load(self.name, options["root"], options["download"])
        assert isinstance(table, LabelledExamples)
        train, test = (table.x_train, table.y_train), (table.x_test, table.y_test)
        super().__init__(options, source, train, test, classes=table.classes)

    def _make_model(self) -> nn.Module:
        return Mlp(self.train_split.x.shape[1], self.options["hidden"], self.classes)
