"""Convex problems: logistic regression and the linear support vector machine on binary tables.

With s = 2y - 1 in {-1, +1} and the score z = <w, x> + b, the objective is

    mean loss(s z) + l2 / 2 |w|^2,    loss(m) = log(1 + exp(-m))  or  max(0, 1 - m);

the bias is not regularised. With ``l2 > 0`` it is strongly convex in w. ``digits-five`` regularises the bias, too, and
is strongly convex in all parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.rules import OneOf, Real
from fedcomp.tasks.base import COMMON_OPTIONS, Split, Task
from fedcomp.tasks.models import Mlp
from fedcomp.tasks.options import TaskOption
from fedcomp.tasks.sources import LabelledExamples, load


def linear_rows(task: Task, data: Split) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return ``(X, y)`` of a linear task's examples, shapes ``(N, features)`` and ``(N,)``, labels 0 and 1.

    Raises
    ------
    ConfigError
        As :attr:`fedcomp.tasks.base.Task.linear_loss`.
    """
    _ = task.linear_loss  # a task that has none says so
    return data.x.astype(np.float64), data.y.astype(np.float64)


class _LinearTask(Task):
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **COMMON_OPTIONS,
        "model": TaskOption("logistic", OneOf("logistic", "svm"), "logistic (regression) or svm (hinge loss)"),
        "l2": TaskOption(0.0, Real(least=0.0), "coefficient of |w|^2 / 2 in the objective"),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        table, source = load(self.name, options["root"], options["download"])
        assert isinstance(table, LabelledExamples)
        train, test = (table.x_train, table.y_train), (table.x_test, table.y_test)
        super().__init__(options, source, train, test, classes=2)

    def _make_model(self) -> nn.Module:
        return Mlp(self.train_split.x.shape[1], (), 1)

    def objective(self, model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean logistic or hinge loss plus the regulariser."""
        margin = (2 * targets - 1) * outputs.squeeze(1)
        if self.options["model"] == "logistic":
            # softplus is log(1 + exp(.)) without the overflow that large negative margins would cause.
            loss = nn.functional.softplus(-margin).mean()
        else:
            loss = torch.clamp(1.0 - margin, min=0.0).mean()
        if self.options["l2"]:
            for values in self._regularised(model):
                loss = loss + 0.5 * self.options["l2"] * values.square().sum()
        return loss

    def _regularised(self, model: nn.Module) -> Iterable[Tensor]:
        # A linear Mlp has two parameters: the weights first, then the bias.
        return (next(model.parameters()),)

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(1) > 0) == (targets > 0)

    @property
    def linear_loss(self) -> str:
        return "hinge" if self.options["model"] == "svm" else "logistic"


class BreastCancer(_LinearTask):
    """569 rows, 30 standardised features, embedded in scikit-learn; a fixed fifth is held out."""

    name = "breast-cancer"


class DigitsZero(_LinearTask):
    """Zero against the other digits: the 1,797 rows of ``digits``, 64 features, a tenth of them positive."""

    name = "digits-zero"


class DigitsFive(_LinearTask):
    """Five and more against the smaller digits: 1,797 rows in order of the digit, 64 features in [0, 1].

    The bias is regularised, too: with ``l2 > 0`` the objective is strongly convex in all 65 parameters, which is what
    linear rates of decentralised methods are stated for.
    """

    name = "digits-five"

    def _regularised(self, model: nn.Module) -> Iterable[Tensor]:
        return model.parameters()

    @property
    def linear_loss(self) -> str:
        """Refused: coded linear rounds would regularise the weights only.

        Raises
        ------
        ConfigError
            Always.
        """
        raise ConfigError(
            "the objective of task 'digits-five' regularises the bias, too, which coded linear rounds do not; use "
            "'digits-zero', 'breast-cancer' or 'a9a'"
        )


class A9a(_LinearTask):
    """UCI Adult, binarised: 32,561 + 16,281 rows, 123 features of 0 and 1.

    Without the files the embedded breast cancer table stands in, with 30 features, and the record says so.
    """

    name = "a9a"
