"""Tasks with a conditional generator, scored by the accuracy of a classifier trained only on its images.

A generator does not learn from records. Its teachers do (:mod:`fedcomp.tasks.gan`), and say in which direction its
images should move; :class:`fedcomp.strategies.private.datalens.DataLens` is how that is federated. So
:meth:`GeneratorTask.train` refuses a generator, while evaluation trains a classifier on generated images alone and
tests it, once, after its last epoch, on real ones that were held out. Taking the best epoch instead would choose on the
test set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedcomp.errors import ConfigError
from fedcomp.rng import Key
from fedcomp.rules import Int, OneOf, Real
from fedcomp.tasks import gan
from fedcomp.tasks.base import COMMON_OPTIONS, Classification, Split, evaluating
from fedcomp.tasks.models import Cnn, Mlp, build
from fedcomp.tasks.options import WIDTHS, TaskOption
from fedcomp.tasks.sources import DataSource, LabelledExamples, load
from fedcomp.tasks.teachers import by_hash

_PIECE: Final = 1000
"""Number of images generated at once; it only bounds memory, since the generator is in evaluation mode."""

_TRAININGS: Final = 5
"""Maximum number of trainings of the classifier in one evaluation; the last has a sixteenth of the step size."""


class Ensemble(NamedTuple):
    """What one client has: its teachers, and a generator to fill with the server's weights."""

    teachers: gan.Teachers
    student: gan.Student


class GeneratorTask(Classification):
    """Images of one channel in [0, 1]; the model is a generator of them.

    Attributes
    ----------
    side : int
        Height and width of an image.
    """

    needs = "generator"
    side: ClassVar[int]
    scale: ClassVar[tuple[float, float]]
    """Deviation and mean the loader standardised pixels in [0, 1] with."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        table, source = load(self.name, options["root"], options["download"])
        assert isinstance(table, LabelledExamples)
        x, y = self._pixels(table.x_train), table.y_train
        if options["records"]:
            x, y = simulate(x, y, options["records"], Key(options["records_seed"], "records"))
            source = _simulated(source, options["records"])
        super().__init__(options, source, (x, y), (self._pixels(table.x_test), table.y_test), classes=table.classes)

    def _pixels(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        deviation, mean = self.scale
        # Generators end in a sigmoid, so pixels go back to [0, 1]; the constants are rounded, hence the clip.
        return np.clip(x * np.float32(deviation) + np.float32(mean), 0.0, 1.0).astype(np.float32)

    @property
    def pixels(self) -> int:
        """Pixels of an image."""
        return self.side**2

    def _make_model(self) -> gan.Generator:
        noise = self.options["noise"]
        if self.options["generator"] == "conv":
            return gan.ConvGenerator(noise, self.classes, self.side, self.options["width"])
        return gan.MlpGenerator(noise, self.classes, self.options["hidden"], self.pixels)

    def discriminator(self) -> nn.Module:
        """Return a teacher's network; its values are filled in elsewhere."""
        kind = self.options["discriminator"]
        if kind == "conv":
            return gan.ConvDiscriminator(self.classes, self.side, self.options["teacher_width"])
        if kind == "mlp":
            return gan.MlpDiscriminator(self.classes, self.pixels, self.options["teacher_hidden"])
        return gan.Bilinear(self.classes, self.pixels)

    def student(self, adam: gan.Adam) -> gan.Student:
        """Return the generator's side."""
        # Seed 0 does not matter: the student loads the server's weights before every use.
        module = build(self._make_model, 0)
        assert isinstance(module, gan.Generator)
        return gan.Student(module, adam)

    def ensemble(
        self, partition: int, num_partitions: int, teachers: int, adam: gan.Adam, *, batch: int, key: Key
    ) -> Ensemble:
        """Return the teachers of one client.

        Parameters
        ----------
        partition, num_partitions : int
            Whose records, of how many clients.
        teachers : int
            How many of them share the client's records, each record with one of them by a keyed hash of its position
            in the training split.
        batch : int
            Records of a step.
        key : Key
            Names who gets which record, initial values and batches.
        """
        data = self.client(partition, num_partitions)
        # With the federation's key, not the client's: positions in the training split name records for all clients.
        owner = by_hash(data.indices, teachers, key.at(purpose=f"{key.purpose}/owner"))
        made = gan.Teachers(
            self.discriminator,
            data,
            owner,
            teachers,
            classes=self.classes,
            adam=adam,
            batch=batch,
            key=key.at(partition=partition),
        )
        return Ensemble(made, self.student(adam))

    def train(self, model: nn.Module, data: Split, **settings: Any) -> dict[str, float]:
        """Train a classifier, as any classification task does.

        Raises
        ------
        ConfigError
            For a generator: there is nothing in a record that it could be compared with.
        """
        if isinstance(model, gan.Generator):
            raise ConfigError(
                f"the model of task {self.name!r} is a generator, which learns from votes of discriminators, not "
                "from records; use the system 'datalens'"
            )
        return super().train(model, data, **settings)

    def synthetic(self, model: nn.Module, count: int, key: Key) -> Split:
        """Return ``count`` generated images and their labels; the model's mode is restored."""
        assert isinstance(model, gan.Generator)
        images, labels = [], []
        # With running statistics an image does not depend on which others are made along with it.
        with evaluating(model):
            for start in range(0, count, _PIECE):
                size = min(_PIECE, count - start)
                z, drawn = gan.noise_and_labels(key.at(layer=start), size, model.noise, model.classes)
                images.append(model(torch.from_numpy(z), gan.one_hot(drawn, model.classes)).numpy())
                labels.append(drawn)
        return Split(np.concatenate(images), np.concatenate(labels))

    def samples(self, model: nn.Module, columns: int, key: Key) -> NDArray[np.float32]:
        """Return ``columns`` generated images of every class, float32 ``(classes, columns, side, side)``."""
        assert isinstance(model, gan.Generator)
        labels = np.repeat(np.arange(self.classes), columns)
        z, _ = gan.noise_and_labels(key, len(labels), model.noise, model.classes)
        with evaluating(model):
            images = model(torch.from_numpy(z), gan.one_hot(labels, model.classes)).numpy()
        return images.reshape(self.classes, columns, self.side, self.side)

    def classifier(self) -> nn.Module:
        """Return the classifier of an evaluation, initialised the same way every time."""
        make: Callable[[], nn.Module] = (
            (lambda: Cnn(self.side, (32, 64), 64, self.classes))
            if self.options["classifier"] == "cnn"
            else (lambda: Mlp(self.pixels, (64,), self.classes))
        )
        return build(make, 0)

    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """Return loss, accuracy and size of ``split`` for a classifier trained on generated images, after its last
        epoch; of a classifier itself, its own.

        A step that is too large can end a classifier's training: it then names one class whatever it sees, and says
        nothing about the images. One that does so on the very images it learnt from is trained again with half the
        step size, at most four times; ``split`` has no part in that. ``retrained`` is how often it was.
        """
        if not isinstance(model, gan.Generator):
            return super().evaluate(model, split)
        # Fixed keys: every generator is judged with the same noise and batches, so only its weights make a difference.
        made = self.synthetic(model, self.options["synthetic"], Key(0, "evaluation/images"))
        for retrained in range(_TRAININGS):
            classifier = self._trained_classifier(made, self.options["classifier_lr"] / 2**retrained)
            if self._tells_apart(classifier, made):
                break
        return super().evaluate(classifier, split) | {"retrained": float(retrained)}

    def _trained_classifier(self, made: Split, lr: float) -> nn.Module:
        option = self.options
        classifier = self.classifier()
        super().train(
            classifier,
            made,
            lr=lr,
            momentum=option["classifier_momentum"],
            epochs=option["classifier_epochs"],
            batch_size=option["classifier_batch"],
            key=Key(0, "evaluation/batches"),
        )
        return classifier

    def _tells_apart(self, classifier: nn.Module, made: Split) -> bool:
        """Return whether a classifier predicts more than one class on images of more than one class."""
        if len(np.unique(made.y)) == 1:
            return True
        images = made.tensors[0]
        with evaluating(classifier):
            # Outputs that are not numbers all have their largest one at the same place.
            named = [self.outputs(classifier, images[i : i + _PIECE]).argmax(1) for i in range(0, len(images), _PIECE)]
        return len(torch.unique(torch.cat(named))) > 1


def simulate(
    x: NDArray[np.float32], y: NDArray[np.int64], count: int, key: Key
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return ``count`` records that look like ``x``: per class a Gaussian with its mean and covariance, clipped to
    [0, 1]; labels go round the classes.

    For ensembles of more teachers than a small set has records. What is learnt is then a simulation of the set.
    """
    classes = np.unique(y)
    labels = classes[np.arange(count) % len(classes)]
    draws = key.generator().standard_normal((count, x.shape[1]))
    out = np.empty((count, x.shape[1]), np.float32)
    for label in classes:
        own = x[y == label].astype(np.float64)
        mean = own.mean(0)
        # The singular values of the centred rows are the standard deviations: no covariance has to be formed.
        _, deviations, axes = np.linalg.svd(own - mean, full_matrices=False)
        rows = labels == label
        # A class with fewer records than pixels spans fewer axes.
        spread = draws[rows][:, : len(deviations)] * (deviations / np.sqrt(max(1, len(own) - 1)))
        out[rows] = np.clip(mean + spread @ axes, 0.0, 1.0)
    return out, labels.astype(np.int64)


def _simulated(source: DataSource, count: int) -> DataSource:
    drawn = f"{count} records drawn from one Gaussian per class, fitted to the training rows of: {source.served}"
    return replace(
        source,
        served=drawn,
        substitute=True,
        note=f"{source.name}: {drawn}; the test rows are real",
    )


OPTIONS: Final[Mapping[str, TaskOption]] = {
    **COMMON_OPTIONS,
    "noise": TaskOption(20, Int(1), "numbers of noise the generator gets"),
    "generator": TaskOption("mlp", OneOf("mlp", "conv"), "mlp, or conv (transposed convolutions)"),
    "hidden": TaskOption((128,), WIDTHS, "widths of the mlp generator's hidden layers"),
    "width": TaskOption(16, Int(1), "channels of the conv generator's last layer"),
    "discriminator": TaskOption(
        "bilinear", OneOf("bilinear", "mlp", "conv"), "a teacher's network: bilinear in label and pixels, mlp or conv"
    ),
    "teacher_hidden": TaskOption((16,), WIDTHS, "widths of an mlp teacher's hidden layers"),
    "teacher_width": TaskOption(8, Int(1), "channels of a conv teacher's first layer"),
    "records": TaskOption(0, Int(0), "simulated records to learn from instead of the set's own; 0: the set's own"),
    "records_seed": TaskOption(0, Int(0), "names the draw of simulated records"),
    "classifier": TaskOption("mlp", OneOf("mlp", "cnn"), "the classifier that evaluates: mlp or cnn"),
    "synthetic": TaskOption(2000, Int(1), "generated images it learns from"),
    "classifier_epochs": TaskOption(20, Int(1), "passes over them; the last one counts"),
    "classifier_lr": TaskOption(0.1, Real(least=0.0), "its step size"),
    "classifier_momentum": TaskOption(0.9, Real(least=0.0, most=0.999), "its momentum"),
    "classifier_batch": TaskOption(64, Int(1), "its images per step"),
}


class DigitsGenerator(GeneratorTask):
    """8x8 digits. The default generator, 30-128-64, has 12,224 parameters; a bilinear teacher has 650."""

    name = "digits-generator"
    # Pixels are 0 to 16 here: in units of [0, 1] the loader's deviation and mean are sixteenths.
    side, scale = 8, (6.017 / 16.0, 4.884 / 16.0)
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = OPTIONS


class MnistGenerator(GeneratorTask):
    """28x28 digits; without the files the embedded ones, enlarged, and the record says so."""

    name = "mnist-generator"
    side, scale = 28, (0.3081, 0.1307)
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **OPTIONS,
        "noise": replace(OPTIONS["noise"], default=50),
        "generator": replace(OPTIONS["generator"], default="conv"),
        "discriminator": replace(OPTIONS["discriminator"], default="conv"),
        "classifier": replace(OPTIONS["classifier"], default="cnn"),
    }
