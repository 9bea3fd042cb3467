"""Next-character prediction by clients that are unlike: each speaker of a play writes in a dialect of its own.

A small GPT learns it, all its weights or low-rank adapters of it (LoRA, Hu et al. 2021, arXiv 2106.09685) beside a base
that was pretrained on the other speakers' text. Only adapters are in the adapted model's ``state_dict``.
"""

from __future__ import annotations

import functools
import itertools
import re
import string
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedcomp.errors import ConfigError
from fedcomp.rates import falling
from fedcomp.rng import Key
from fedcomp.rules import Flag, Int, OneOf
from fedcomp.tasks import models
from fedcomp.tasks.base import Split, Stepper, Task, single_thread
from fedcomp.tasks.models import CharTransformer
from fedcomp.tasks.options import TaskOption
from fedcomp.tasks.sgd import Sgd
from fedcomp.tasks.shakespeare import TinyShakespeare, check, longest, windows
from fedcomp.tasks.sources import Corpus, load


def _moved(letters: str) -> Callable[[str], str]:
    """Return the dialect that replaces each of these letters by the next one, in either case."""
    turned = letters[1:] + letters[0]
    return lambda text: text.translate(str.maketrans(letters + letters.upper(), turned + turned.upper()))


DIALECTS: Final[Mapping[str, Callable[[str], str]]] = {
    "plain": str,
    "upper case": str.upper,
    "vowels moved": _moved("aeiou"),
    "words reversed": lambda text: re.sub(r"[A-Za-z']+", lambda match: match[0][::-1], text),
    "consonants moved": _moved("tnshrdl"),
    "case swapped": str.swapcase,
    "spaces marked": lambda text: text.replace(" ", "-").replace("\n", ":"),
    "vowels doubled": lambda text: re.sub(r"([aeiou])", r"\1\1", text),
}
"""By name, a function of a text. Speaker i has dialect i modulo their number."""


SCALE: Final = 2.0
"""alpha / rank of all adapters."""


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), whose step is down a loss."""

    def step(self, loss: Any = None) -> None:  # type: ignore[override]  # torch takes a closure
        """Take one step down ``loss``, a scalar; the parameters keep no gradient."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        super().step()
        self.zero_grad()


class Falling:
    """An AdamW whose step size falls over a run: :func:`fedcomp.rates.falling`.

    Parameters
    ----------
    optimizer : AdamW
    lr : float
        The largest step size.
    first, steps : int
        Number of the next step, from 0, and of all steps of the run: by the server's rounds, so that a client which
        missed some of them takes steps as short as those of the others.
    """

    def __init__(self, optimizer: AdamW, lr: float, first: int, steps: int) -> None:
        self.optimizer, self.lr, self.number, self.steps = optimizer, lr, first, steps

    def step(self, loss: Any) -> None:
        """Take the next step down ``loss``."""
        self.optimizer.param_groups[0]["lr"] = self.lr * falling(self.number, self.steps)
        self.optimizer.step(loss)
        self.number += 1


class Lora(nn.Module):
    """The change of a matrix by two factors: scale B A x, A of shape (rank, inputs) and B of shape (outputs, rank).

    The names of its tensors are PEFT's, ``lora_A.weight`` and ``lora_B.weight``.
    """

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the change of the outputs for inputs ``x``."""
        return SCALE * self.lora_B(self.lora_A(x))


class Adapted(nn.Linear):
    """A frozen linear layer and the low-rank change of all its outputs, which begins at zero."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.change = Lora(inputs, outputs, rank)

    def forward(self, x: Tensor) -> Tensor:
        """Return the changed outputs for inputs ``x``."""
        return super().forward(x) + self.change(x)


class AdaptedAttention(nn.Linear):
    """Frozen queries, keys and values of a block in one matrix, and low-rank changes of queries and values."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(width, 3 * width)
        self.q, self.v = Lora(width, width, rank), Lora(width, width, rank)

    def forward(self, x: Tensor) -> Tensor:
        """Return the changed outputs for inputs ``x``."""
        query, key, value = super().forward(x).chunk(3, dim=-1)
        return torch.cat([query + self.q(x), key, value + self.v(x)], dim=-1)


class AdaptedTransformer(CharTransformer):
    """The transformer with adapters on queries, values and both layers behind the attention.

    Its ``state_dict`` holds the adapters alone, so that nothing else can travel.
    """

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int, rank: int) -> None:
        super().__init__(vocabulary, length, width, layers, heads)
        for block in self.blocks:
            block.attention = AdaptedAttention(width, rank)
            block.up, block.down = Adapted(width, 4 * width, rank), Adapted(4 * width, width, rank)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]  # of torch's overloads
        """Return the adapters by name."""
        return {name: each for name, each in super().state_dict(*args, **options).items() if ".lora_" in name}


@functools.lru_cache(maxsize=4)
def pretrained(text: str, alphabet: str, length: int, width: int, layers: int, heads: int, steps: int) -> nn.Module:
    """Return a transformer that learned a text, a function of these arguments: AdamW at 0.002 with 50 steps of warm-up
    and a linear decay, 16 windows a step at random places. Not to be written to: it is kept for the next call.
    """
    model = models.build(lambda: CharTransformer(len(alphabet), length, width, layers, heads), 0)
    code = {char: i for i, char in enumerate(alphabet)}
    chars = np.array([code[c] for c in text], np.int64)
    optimizer = AdamW(model.parameters(), lr=2e-3, foreach=False)
    with single_thread():
        for step in range(steps):
            starts = (Key(0, "dialects/pretraining", step).uniform(16) * (len(chars) - length)).astype(np.int64)
            window = torch.from_numpy(np.stack([chars[start : start + length + 1] for start in starts]))
            optimizer.param_groups[0]["lr"] = 2e-3 * min((step + 1) / 50, max(0.05, 1.0 - step / steps))
            outputs = model(window[:, :-1])
            optimizer.step(nn.functional.cross_entropy(outputs.flatten(0, 1), window[:, 1:].flatten()))
    return model.requires_grad_(False)


class Dialects(TinyShakespeare):
    """The speakers with the most text, each in one of eight dialects; a transformer predicts the next character.

    Examples are those of ``tiny-shakespeare``. Equally many windows of every speaker are held out, spread over the last
    tenth of its text, so that the loss on the test split is the mean over speakers. They are in turns of one window a
    speaker: of as many clients as speakers, each evaluates on its own text.
    """

    name = "dialects"
    OPTIONS: ClassVar[Mapping[str, TaskOption]] = {
        **{key: TinyShakespeare.OPTIONS[key] for key in ("partition", "partition_seed", "min_examples")},
        **{key: TinyShakespeare.OPTIONS[key] for key in ("root", "download", "min_chars", "heads")},
        "seq_len": TaskOption(64, Int(2), "characters per window"),
        "speakers": TaskOption(8, Int(1), "speakers with the most text who take part"),
        "held_out": TaskOption(16, Int(1), "most windows of each speaker that are held out"),
        "validation": TaskOption(
            False, Flag(), "hold out the windows before, and leave the last tenth alone: for tuning"
        ),
        "hidden": TaskOption(64, Int(1), "the transformer's width"),
        "layers": TaskOption(4, Int(1), "the transformer's blocks"),
        "pretrained": TaskOption(0, Int(0), "steps of pretraining on the other speakers' text; 0 starts at random"),
        "rank": TaskOption(0, Int(0), "of adapters beside a frozen base; 0 trains all weights"),
        "frozen_a": TaskOption(False, Flag(), "keep the half A of all adapters as it was drawn"),
        "optimizer": TaskOption("sgd", OneOf("sgd", "adamw"), "of a client: sgd, or adamw with decays 0.9 and 0.99"),
        "kept": TaskOption(False, Flag(), "clients keep the moments of adamw from round to round"),
        "falls": TaskOption(
            0, Int(0), "steps over which the step size of adamw falls to a tenth, by the server's rounds; 0 keeps it"
        ),
    }

    def __init__(self, options: Mapping[str, Any]) -> None:
        check({**options, "model": "transformer"})
        if options["kept"] and options["optimizer"] == "sgd":
            raise ConfigError("kept=True keeps the moments of adamw; write optimizer='adamw' as well")
        if options["falls"] and options["optimizer"] == "sgd":
            raise ConfigError("falls is of the step size of adamw; write optimizer='adamw' as well")
        if options["frozen_a"] and not options["rank"]:
            raise ConfigError("frozen_a=True is of adapters; write their rank as well, such as rank=16")
        corpus, source = load(self.name, options["root"], options["download"])
        assert isinstance(corpus, Corpus)
        kept = longest(corpus.texts, options)
        self.speakers = tuple(kept)
        rest = "".join(said for speaker, said in corpus.texts.items() if speaker not in kept)
        if options["pretrained"] and len(rest) <= options["seq_len"]:
            raise ConfigError(f"speakers={options['speakers']} leaves no text to pretrain on; lower speakers")
        self._rest = rest
        # Letters of either case and the marks: dialects write them where the plays do not.
        self.alphabet = "".join(sorted({*"".join(corpus.texts.values()), *string.ascii_letters, *"-:"}))
        written = zip(kept.values(), itertools.cycle(DIALECTS.values()), strict=False)
        pairs = [windows(dialect(said), self.alphabet, options["seq_len"]) for said, dialect in written]
        # A tenth is left alone, and another one where the validation split stands in.
        ends = [pair.shape[1] - options["validation"] * max(1, pair.shape[1] // 10) for pair in pairs]
        cuts = [end - max(1, pair.shape[1] // 10) for pair, end in zip(pairs, ends, strict=True)]
        held = min(options["held_out"], *(end - cut for end, cut in zip(ends, cuts, strict=True)))
        places = [np.linspace(cut, end - 1, held).astype(np.int64) for cut, end in zip(cuts, ends, strict=True)]
        test = np.stack([pair[:, at] for pair, at in zip(pairs, places, strict=True)], axis=2)
        x, y = np.concatenate([pair[:, :cut] for pair, cut in zip(pairs, cuts, strict=True)], axis=1)
        x_test, y_test = test.reshape(2, -1, options["seq_len"])
        ids = np.repeat(np.arange(len(cuts)), cuts)
        Task.__init__(self, options, source, (x, y), (x_test, y_test), classes=len(self.alphabet), ids=ids)

    def _sizes(self) -> tuple[int, int, int, int]:
        o = self.options
        return o["seq_len"], o["hidden"], o["layers"], o["heads"]

    def _make_model(self) -> nn.Module:
        if self.options["rank"]:
            return AdaptedTransformer(self.classes, *self._sizes(), self.options["rank"])
        return CharTransformer(self.classes, *self._sizes())

    def model(self, seed: int) -> nn.Module:
        """Return a new model: the pretrained one where there is one, with adapters that change nothing yet."""
        model, steps = super().model(seed), self.options["pretrained"]
        base = pretrained(self._rest, self.alphabet, *self._sizes(), steps) if steps else None
        whole = dict(model.named_parameters())
        with torch.no_grad():
            for name, value in base.named_parameters() if base is not None else ():
                whole[name].copy_(value)
            for name, value in whole.items() if self.options["rank"] else ():
                value.requires_grad_(".lora_B" in name or (".lora_A" in name and not self.options["frozen_a"]))
                if ".lora_B" in name:
                    value.zero_()
        return model

    def optimizer(self, model: nn.Module, *, lr: float, **rates: float) -> Stepper:
        """Return SGD, or AdamW with ``weight_decay``.

        Raises
        ------
        ConfigError
            For AdamW with a momentum or a proximal term.
        """
        if self.options["optimizer"] == "sgd":
            return super().optimizer(model, lr=lr, **rates)
        # Checked as those of SGD are.
        Sgd([], lr=lr, **rates)
        if rates.get("momentum") or rates.get("proximal"):
            raise ConfigError("momentum and proximal terms are of optimizer='sgd'; leave them out with 'adamw'")
        decay = rates.get("weight_decay", 0.0)
        return AdamW(
            [p for p in model.parameters() if p.requires_grad],
            lr=lr,
            betas=(0.9, 0.99),
            weight_decay=decay,
            foreach=False,
        )

    def train(
        self, model: nn.Module, data: Split, *, lr: float, key: Key, optimizer: Stepper | None = None, **options: Any
    ) -> dict[str, float]:
        """Train as every task does; with ``falls`` at a step size by the key's round, which is the server's.

        Raises
        ------
        ConfigError
            With ``falls`` where the steps of a round are not limited.
        """
        if self.options["falls"]:
            if not (count := options.get("max_steps")):
                raise ConfigError("falls counts the steps of a round; set max_steps")
            rates = {name: options[name] for name in ("momentum", "weight_decay", "proximal") if name in options}
            made: Any = self.optimizer(model, lr=lr, **rates) if optimizer is None else optimizer
            optimizer = Falling(made, lr, max(0, key.round - 1) * count, self.options["falls"])
        return super().train(model, data, lr=lr, key=key, optimizer=optimizer, **options)
