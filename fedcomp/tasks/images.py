"""Image data of ten classes: scikit-learn's 8x8 digits (embedded, the default task), MNIST, a subset of CIFAR-10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from fedcomp.errors import ConfigError
from fedcomp.rules import Flag, Int, Maybe, OneOf
from fedcomp.tasks.base import COMMON_OPTIONS, Classification
from fedcomp.tasks.models import Cnn, Mlp, QuickstartCnn
from fedcomp.tasks.options import WIDTHS, TaskOption
from fedcomp.tasks.sources import LabelledExamples, held_out, load

MODEL_OPTIONS: Mapping[str, TaskOption] = {
    "model": TaskOption("mlp", OneOf("mlp", "cnn"), "mlp or cnn"),
    "hidden": TaskOption((256, 256), WIDTHS, "widths of the mlp's hidden layers"),
    "batch_norm": TaskOption(False, Flag(), "batch normalisation after the cnn's convolutions"),
    "train_examples": TaskOption(None, Maybe(Int(1)), "use only this many training examples, from the first"),
    "test_examples": TaskOption(None, Maybe(Int(1)), "test on only this many test examples, from the first"),
    "validation": TaskOption(False, Flag(), "hold out a fifth of the training examples and test on them: for tuning"),
}


class _Images(Classification):
    """Images of ten classes; ``side``, ``channels``, ``width`` and ``kernel`` shape the CNN for one colour."""

    side: ClassVar[int]
    channels: ClassVar[tuple[int, int]]
    width: ClassVar[int]
    kernel: ClassVar[int]

    def __init__(self, options: Mapping[str, Any]) -> None:
        if options.get("batch_norm") and options["model"] != "cnn":
            raise ConfigError("batch_norm=True is of the cnn; write model='cnn' as well")
        table, source = load(self.name, options["root"], options["download"])
        assert isinstance(table, LabelledExamples)
        stop, end = options["train_examples"], options["test_examples"]
        train, test = (table.x_train[:stop], table.y_train[:stop]), (table.x_test[:end], table.y_test[:end])
        super().__init__(options, source, train, test, classes=table.classes)
        if options["validation"]:
            self._test_on(held_out(self.train_split.y))

    def _make_model(self) -> nn.Module:
        if self.options["model"] == "mlp":
            return Mlp(self.side**2, self.options["hidden"], self.classes)
        if self.options["model"] == "quickstart":
            return QuickstartCnn()
        return Cnn(
            self.side,
            self.channels,
            self.width,
            self.classes,
            kernel=self.kernel,
            batch_norm=self.options["batch_norm"],
        )


class DigitImages(_Images):
    """1,797 handwritten digits of 8x8 pixels, embedded in scikit-learn; a fixed fifth is held out.

    The default model, an MLP with two hidden layers of 256, has 85,002 parameters; the CNN has 13,706. "quickstart" is
    the CNN of :class:`Cifar`, 62,006 parameters, on images enlarged to 32x32 in three equal colours.
    """

    name = "digits"
    side, channels, width, kernel = 8, (16, 32), 64, 3
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **COMMON_OPTIONS,
        **MODEL_OPTIONS,
        "model": TaskOption("mlp", OneOf("mlp", "cnn", "quickstart"), "mlp, cnn or quickstart"),
    }


class Mnist(_Images):
    """70,000 handwritten digits of 28x28 pixels, the usual 60,000 / 10,000 split; a CNN of 114,314
    parameters.

    Without the files the embedded 8x8 digits are enlarged to 28x28: shapes, model and bytes are those of
    MNIST, the accuracy is not, and the record says so.
    """

    name = "mnist"
    side, channels, width, kernel = 28, (16, 32), 64, 5
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **COMMON_OPTIONS,
        **MODEL_OPTIONS,
        "model": TaskOption("cnn", OneOf("mlp", "cnn"), "mlp or cnn"),
    }


class Cifar(_Images):
    """12,000 images of CIFAR-10 (32x32 pixels, three colours), stored as JPEG files: 10,000 and 2,000 for testing.

    The default model is the CNN of Flower's PyTorch quickstart, 62,006 parameters. The files are lossy: no figure from
    here may be compared with a published one. Without them the embedded 8x8 digits are enlarged to 32x32 in three equal
    colours: shapes, model and bytes are the same, the accuracy is not, and the record says so.
    """

    name = "cifar10-subset"
    side = 32
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **COMMON_OPTIONS,
        # Without batch_norm, which only the CNN for one colour has.
        **{key: MODEL_OPTIONS[key] for key in ("hidden", "train_examples", "test_examples", "validation")},
        "model": TaskOption("quickstart", OneOf("mlp", "quickstart"), "mlp or quickstart"),
    }

    def _make_model(self) -> nn.Module:
        if self.options["model"] == "mlp":
            return Mlp(3 * self.side**2, self.options["hidden"], self.classes)
        return QuickstartCnn()
