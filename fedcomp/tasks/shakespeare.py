"""Next-character prediction with one speaker of a play per client, which is naturally non-IID."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.rules import Int, Maybe, OneOf
from fedcomp.tasks.base import COMMON_OPTIONS, Task
from fedcomp.tasks.models import CharLstm, CharTransformer
from fedcomp.tasks.options import TaskOption
from fedcomp.tasks.partition import parse_partitioner
from fedcomp.tasks.sources import Corpus, load


def check(options: Mapping[str, Any]) -> None:
    """Refuse a partition by class, and a width that the heads of the transformer do not divide."""
    if parse_partitioner(options["partition"]).kind not in ("natural", "iid"):
        raise ConfigError(
            f"partition={options['partition']!r} splits by class, which text windows do not have; "
            "use 'natural' or 'iid'"
        )
    if options["model"] == "transformer" and options["hidden"] % options["heads"]:
        raise ConfigError(f"heads={options['heads']} does not divide the width, hidden={options['hidden']}")


def longest(texts: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the speakers with the most text, longest first: as many as ``speakers`` says, each with at
    least ``min_chars`` characters and with two windows of ``seq_len``, one to train on and one to hold out; a third
    with ``validation``.

    Raises
    ------
    ConfigError
        When no text is that long.
    """
    # The name breaks ties, so that "the first so many speakers" are the same in every process.
    by_length = sorted(texts.items(), key=lambda item: (-len(item[1]), item[0]))
    windows_each = 2 + options.get("validation", False)
    least = max(options["min_chars"], windows_each * options["seq_len"] + 1)
    kept = [(speaker, said) for speaker, said in by_length if len(said) >= least][: options["speakers"]]
    if not kept:
        asked = "min_chars" if least == options["min_chars"] else "seq_len"
        raise ConfigError(f"no speaker has {least} characters; lower {asked}")
    return dict(kept)


def windows(text: str, alphabet: str, width: int) -> NDArray[np.int64]:
    """Return the successive windows of a text and the same ones a character later, shape ``(2, windows, width)``."""
    code = {char: i for i, char in enumerate(alphabet)}
    chars = np.array([code[c] for c in text], np.int64)
    # One character less: the targets are the inputs shifted by one.
    count = (len(chars) - 1) // width
    return np.stack([chars[: count * width], chars[1 : count * width + 1]]).reshape(2, count, width)


class TinyShakespeare(Task):
    """Forty thousand lines of Shakespeare by speaker; an LSTM or a transformer predicts each next character.

    An example is a window of ``seq_len`` characters and the same window one later, both int64 ``(N,
    seq_len)``; the last tenth of each speaker's windows is held out. Loss is in nats per character, accuracy
    per character. Without the file twenty synthetic Markov speakers stand in, and the record says so.
    """

    name = "tiny-shakespeare"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **COMMON_OPTIONS,
        "partition": TaskOption("natural", COMMON_OPTIONS["partition"].rule, "natural (by speaker) or iid"),
        "seq_len": TaskOption(32, Int(2), "characters per window"),
        "speakers": TaskOption(None, Maybe(Int(1)), "keep the speakers with the most text"),
        "min_chars": TaskOption(1000, Int(0), "drop speakers with less text"),
        "model": TaskOption("lstm", OneOf("lstm", "transformer"), "lstm or transformer"),
        "embedding": TaskOption(16, Int(1), "size of the lstm's character embedding"),
        "hidden": TaskOption(128, Int(1), "units of each recurrent layer, or the transformer's width"),
        "layers": TaskOption(1, Int(1), "recurrent layers, or the transformer's blocks"),
        "heads": TaskOption(4, Int(1), "attention heads of the transformer, a divisor of its width"),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        check(options)
        corpus, source = load(self.name, options["root"], options["download"])
        assert isinstance(corpus, Corpus)
        # The alphabet is the whole text's, so that dropping speakers leaves the model's shape as it is.
        self.alphabet = "".join(sorted(set("".join(corpus.texts.values()))))
        kept = longest(corpus.texts, options)
        self.speakers = tuple(kept)
        train, test, ids = [], [], []
        for number, said in enumerate(kept.values()):
            pair = windows(said, self.alphabet, options["seq_len"])
            count = pair.shape[1]
            # One window at least is held out, also of the shortest text.
            cut = count - max(1, count // 10)
            train.append(pair[:, :cut])
            test.append(pair[:, cut:])
            ids.append(np.full(cut, number, np.int64))
        x, y = np.concatenate(train, axis=1)
        x_test, y_test = np.concatenate(test, axis=1)
        super().__init__(options, source, (x, y), (x_test, y_test), classes=len(self.alphabet), ids=np.concatenate(ids))

    def _make_model(self) -> nn.Module:
        o = self.options
        if o["model"] == "transformer":
            return CharTransformer(self.classes, o["seq_len"], o["hidden"], o["layers"], o["heads"])
        return CharLstm(self.classes, o["embedding"], o["hidden"], o["layers"])

    def objective(self, model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    def correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(2) == targets).flatten()
