"""Adapters of low rank, B A: which half travels, and how both ends draw the other one.

Of two factors the mean is not the mean of their products. If A is the same everywhere and never trained, it is: the
mean of the B_i A is (mean of the B_i) A. So A is drawn from the run's seed at server and clients and never sent, and
everything that is linear in B (codecs, sums, clipping and noise) is linear in the product. This is FFA-LoRA (Sun, Li,
Li, Ding, "Improving LoRA in privacy-preserving federated learning", ICLR 2024, recalled); that A need not travel, and
the rule for which half is A, are derived here.

The scale alpha / r of an adapter is in no state dict and needs no message: it is a constant of the app, and every
client must use the same. Clients of unequal ranks hold all columns and train the first r_i (:func:`freeze`); what they
do not train has changed by nothing, so that the mean stays exact.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcomp import params
from fedcomp.device import DeviceArray
from fedcomp.errors import ConfigError, LayoutError
from fedcomp.rng import Key
from fedcomp.rules import Configured, Int, Many, Text
from fedcomp.wire import Bf16

V = TypeVar("V")

PEFT: Final = (("lora_A", "lora_B"), ("lora_embedding_B", "lora_embedding_A"))
"""PEFT's words for two halves; the first of a pair is the one that is random when an adapter is made."""

_TWICE: Final = "base_model.model.base_model.model."
_ORDINARY: Final = "lora_magnitude_vector"  # DoRA's: not in the product, an ordinary tensor beside it.
_MOST: Final = 1 << 28

WORKING: Final = ("float32", "bfloat16", "float16")
"""Dtypes in which apps hold adapters that travel as float32."""


@dataclass(frozen=True, repr=False, eq=False)
class Halves(Configured):
    """The halves of a model's adapters that are drawn at both ends.

    Parameters
    ----------
    at : tuple of tuple of int
        One for each tensor that travels and is called a half, in the model's order: where its drawn half stands in the
        whole model, and that one's shape; a single 0 for one that has none.
    pairs : tuple of (str, str)
        The words that tell the two halves of an adapter apart.
    base : str
        :func:`fedcomp.flower.records.base_digest` of the model that is adapted; empty where nobody compares it.
    """

    at: Annotated[tuple[tuple[int, ...], ...], Many(Many(Int(0, _MOST), 6, least=1), 1 << 16)]
    pairs: Annotated[tuple[tuple[str, str], ...], Many(Many(Text(256, least=1), 2, least=2), 16)] = PEFT
    base: Annotated[str, Text(64)] = ""

    def conflict(self) -> str:
        """Return why a half cannot be drawn; empty where all can."""
        if any(math.prod(shape) > _MOST for _, *shape in self.at):
            return f"a half of an adapter has more than {_MOST:,} values"
        return ""

    def to_config(self) -> dict[str, Any]:
        """Return what :meth:`from_config` takes; it is in every message of a run."""
        config = self.get_config()
        return {name: value for name, value in config.items() if name == "at" or getattr(self, name) not in (PEFT, "")}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Return the halves of :meth:`to_config`.

        Raises
        ------
        ConfigError
            For any other dictionary.
        """
        try:
            return super().from_config(config)
        except TypeError as error:
            raise ConfigError(f"not a description of halves of adapters: {error}") from error

    @property
    def size(self) -> int:
        """Number of values that are drawn."""
        return sum(math.prod(shape) for _, *shape in self.at if shape)

    def drawn(self, shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, NDArray[np.float32]]:
        """Return the drawn halves of a model, not to be written to.

        Parameters
        ----------
        shapes : mapping of str to tuple of int
            Of the tensors that travel, in order.
        seed : int

        Raises
        ------
        LayoutError
            When these are not the tensors of this model.
        """
        partners = {name: found for name in shapes if (found := partner_of(name, self.pairs))[0]}
        if len(partners) != len(self.at):
            raise LayoutError(f"{len(partners)} halves of adapters travel, and {len(self.at)} belong to them")
        return {
            partner: draw(seed, partner, tuple(shape), _bound(word, tuple(shape), shapes[name]))
            for (name, (partner, word, _)), (_, *shape) in zip(partners.items(), self.at, strict=True)
            if shape
        }

    def placed(self, travels: Mapping[str, V], drawn: Mapping[str, V]) -> dict[str, V]:
        """Return the whole model in its own order.

        Raises
        ------
        LayoutError
            When the halves do not stand where they should.
        """
        places = dict(zip((index for index, *shape in self.at if shape), drawn, strict=True))
        others = iter(travels)
        names = [places[i] if i in places else next(others, "") for i in range(len(travels) + len(drawn))]
        whole = {name: drawn[name] if name in drawn else travels[name] for name in names if name}
        if len(whole) != len(names):
            raise LayoutError("the drawn halves of adapters do not fit between the tensors that travel")
        return whole

    def names(self, whole: Sequence[str]) -> set[str]:
        """Return the names of the drawn halves in a whole model."""
        return {whole[index] for index, *shape in self.at if shape and index < len(whole)}


@dataclass(frozen=True, repr=False, eq=False)
class AdapterNames(Configured):
    """What may travel of an app's adapters; everything else is refused by name.

    Parameters
    ----------
    also : tuple of str
        Names of tensors that are trained and sent beside the adapters, or shell patterns: "*.lm_head.weight", "*.bias".
    pairs : tuple of (str, str)
        Parts of a name, between dots or slashes, that tell the two halves of an adapter apart; default PEFT's.
    base : str
        Of :class:`Halves`.
    """

    also: Annotated[tuple[str, ...], Many(Text(256, least=1), 256)] = ()
    pairs: Annotated[tuple[tuple[str, str], ...], Many(Many(Text(256, least=1), 2, least=2), 16)] = PEFT
    base: Annotated[str, Text(64)] = ""

    def halves(self, model: Mapping[str, NDArray[Any]], seed: int) -> Halves:
        """Return which halves of a model's adapters are drawn: those that are random while the others are zero.

        Halves are paired by their names, whatever their order; the rank is the axis that two of them share.

        Raises
        ------
        ConfigError
            Naming the tensor, for one that is neither half of an adapter nor in ``also``, for a half without the other
            one, and for an adapter of which neither half is zero or drawn from this seed.
        """
        drawn_of: dict[str, str] = {}
        for name in model:
            if _TWICE in name:
                raise ConfigError(
                    f"tensor {name!r} has PEFT's prefix twice, so PEFT would load it into nothing; send what "
                    "get_peft_model_state_dict(model) returns, as it is"
                )
            partner, _, first = partner_of(name, self.pairs)
            if partner not in model:
                self._require_ordinary(name, partner)
            elif first:
                found = self._drawn(name, partner, model, seed)
                drawn_of[name if found == partner else partner] = found
        if not drawn_of:
            raise ConfigError(
                f"none of the model's {len(model)} tensors is half of an adapter (pairs={self.pairs!r}); use "
                "Compressed(...), which takes any model"
            )
        places = {name: index for index, name in enumerate(model)}
        drawn = set(drawn_of.values())
        travels = [name for name in model if name not in drawn and partner_of(name, self.pairs)[0]]
        at = [(places[n], *model[n].shape) if (n := drawn_of.get(name, "")) else (0,) for name in travels]
        return Halves(tuple(at), self.pairs, self.base)

    def _require_ordinary(self, name: str, partner: str) -> None:
        # Names of pytrees have brackets, which are a pattern's own.
        if any(name == pattern or fnmatch.fnmatchcase(name, pattern) for pattern in self.also):
            return
        if partner:
            raise ConfigError(
                f"tensor {name!r} has a half's name, and the model lacks the other one, {partner!r}; send both, or "
                f"allow a bias of its own with also=[{name!r}]"
            )
        if _ORDINARY not in re.split(r"[./]", name):
            raise ConfigError(
                f"tensor {name!r} is not half of an adapter, and it would travel with every message. If it is trained, "
                f"allow it with also=[{name!r}]; else leave it out of the state dict (PEFT adds tables of embeddings "
                "unless it is told save_embedding_layers=False)"
            )

    def _drawn(self, first: str, second: str, model: Mapping[str, NDArray[Any]], seed: int) -> str:
        """Return the name of that of two halves which is drawn: by value, for PEFT's embeddings swap the two words."""
        for name, other in ((first, second), (second, first)):
            if model[name].ndim < 2 or model[name].dtype.kind != "f":
                raise ConfigError(
                    f"half {name!r} of an adapter is {model[name].dtype}{model[name].shape}, not a matrix"
                )
            # A run that goes on: its model holds what was drawn when it began, perhaps as an app's dtype rounds it.
            own, (_, word, _) = model[name], partner_of(other, self.pairs)
            drawn = draw(seed, name, own.shape, _bound(word, own.shape, model[other].shape))
            if own.any() and _kept_as(own, drawn):
                return name
        zero = [name for name in (first, second) if not model[name].any()]
        if not zero:
            raise ConfigError(
                f"neither {first!r} nor {second!r} is zero, nor drawn from seed={seed}: another half would change the "
                "model. Merge the adapter into the base model (merge_and_unload) and begin with a new one, or continue "
                "with the seed of its own run"
            )
        return second if zero == [first] else first


def partner_of(name: str, pairs: Sequence[tuple[str, str]] = PEFT) -> tuple[str, str, bool]:
    """Return the name of an adapter's other half, the word that says so, and whether ``name`` is a first half; empty
    texts where ``name`` is no half.

    Examples
    --------
    >>> partner_of("layers.0.q.lora_B.default.weight")
    ('layers.0.q.lora_A.default.weight', 'lora_A', False)
    """
    parts = re.split(r"([./])", name)
    for words in pairs:
        for index, part in enumerate(parts):
            if part in words:
                word = words[1] if part == words[0] else words[0]
                return "".join((*parts[:index], word, *parts[index + 1 :])), word, part == words[0]
    return "", "", False


# A run asks for the same halves in every round, and in one process for every client.
@lru_cache(512)
def draw(seed: int, name: str, shape: tuple[int, ...], bound: float) -> NDArray[np.float32]:
    """Return one half of an adapter: float32, uniform in [-bound, bound), from a stream of its own; read-only."""
    uniform = Key(seed, f"adapter {name}").uniform(math.prod(shape))
    drawn = ((2.0 * uniform - 1.0) * bound).astype(np.float32).reshape(shape)
    drawn.setflags(write=False)
    return drawn


def _bound(word: str, shape: tuple[int, ...], other: tuple[int, ...]) -> float:
    """Return the bound of a half's uniform values: Kaiming's 1 / sqrt(inputs), as in torch and PEFT.

    An embedding has one input that is not zero: its values have unit variance, as in PEFT.

    Raises
    ------
    ConfigError
        When the two halves share no axis.
    """
    rank, _ = _rank(shape, other)
    return math.sqrt(3.0) if "embedding" in word else 1.0 / math.sqrt(math.prod(shape) / rank)


def _rank(shape: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int]:
    """Return the rank of an adapter and its axis in the half of the first shape.

    Raises
    ------
    ConfigError
        When the two halves share no axis.
    """
    shared = [(a, axis) for axis, (a, b) in enumerate(zip(shape[:2], other[1::-1], strict=False)) if a == b and a > 0]
    if not shared or min(len(shape), len(other)) < 2:
        raise ConfigError(f"halves of an adapter of shapes {shape} and {other} share no axis, which would be its rank")
    # Of a square layer they share both; the rank is the shorter one.
    return min(shared)


def nearest(values: NDArray[Any], working: str) -> Any:
    """Return ``values`` rounded to an app's dtype ``working``, one of :data:`WORKING`, as float32."""
    if working != "float32" and isinstance(values, DeviceArray):
        return values.nearest(working)
    wide = np.asarray(values, np.float32)
    if working == "bfloat16":
        return Bf16(wide).decode().reshape(wide.shape)
    # What is too large becomes infinite, as in the app's model.
    with np.errstate(over="ignore"):
        return wide.astype(np.float16).astype(np.float32) if working == "float16" else wide


def trained_from(given: NDArray[Any], returned: NDArray[Any], rounded: NDArray[Any]) -> NDArray[Any]:
    """Return ``given`` plus what an app changed of its rounded copy, so that changes below the spacing add up."""
    # Not where nothing changed: infinities of a mask have no difference.
    with np.errstate(invalid="ignore"):
        return np.where(returned == rounded, given, given + (returned - rounded))


def returned(
    whole: Mapping[str, NDArray[Any]],
    drawn: Mapping[str, NDArray[Any]],
    after: Mapping[str, NDArray[Any]],
    pairs: Sequence[tuple[str, str]] = PEFT,
) -> dict[str, NDArray[Any]]:
    """Return the tensors that travel of the model ``after`` that an app made of ``whole``.

    An app that holds an adapter in 16 bits is recognised because its drawn half comes back rounded. What the app
    changed of the other half is then added to the float32 values that it was given.

    Raises
    ------
    ConfigError
        Naming a drawn half that came back changed, or not at all.
    """
    working: dict[str, str] = {}
    for name, own in drawn.items():
        came = after.get(name)
        if came is None or came.shape != own.shape:
            raise ConfigError(
                f"the reply lacks {name!r}, which is in the message: return all tensors of it under their own names"
            )
        working[name] = _kept_as(came, own)
        if not working[name]:
            raise ConfigError(
                f"{name!r} came back changed. It must stay the same at all clients and is not trained: call "
                "fc.freeze(model) before the optimizer is made, and load the message before training (a wrong prefix "
                "loads nothing, and PEFT raises nothing)"
            )
    found = {name: array for name, array in after.items() if name not in drawn}
    for name, array in found.items():
        given, partner = whole.get(name), partner_of(name, pairs)[0]
        if given is None or given.dtype != np.float32:
            continue
        # A tensor beside the adapters may have a dtype of its own, or any of theirs.
        for kept in [working[partner]] if partner in working else sorted(set(working.values())):
            if kept != "float32" and np.array_equal(array, nearest(array, kept)):
                found[name] = trained_from(given, array.astype(np.float32), nearest(given, kept))
                break
    return found


def _kept_as(came: NDArray[Any], own: NDArray[Any]) -> str:
    """Return the dtype in which ``came`` has the values of ``own``, one of :data:`WORKING`; empty where in none."""
    return next((each for each in WORKING if np.array_equal(came.astype(np.float32), nearest(own, each))), "")


def freeze(model: Any, rank: int | None = None, *, pairs: Iterable[tuple[str, str]] = PEFT) -> list[str]:
    """Freeze the drawn halves of an app's model, and return their names.

    Parameters
    ----------
    model : torch.nn.Module
        With adapters in it, before the optimizer is made.
    rank : int, optional
        Train only the first columns of the other halves, on a client with little memory or data: the gradients of
        the remaining columns are set to zero. The optimizer must not decay weights.
    pairs : tuple of (str, str)
        As of :class:`AdapterNames`.

    Raises
    ------
    ConfigError
        When the model has no adapters, or one of them fewer columns than ``rank``.

    Examples
    --------
    >>> model = get_peft_model(base, LoraConfig(r=16))  # doctest: +SKIP
    >>> fc.freeze(model, rank=4)  # doctest: +SKIP
    """
    parameters, words, frozen = dict(model.named_parameters()), tuple(pairs), []
    for name, parameter in parameters.items():
        partner, _, first = partner_of(name, words)
        if partner not in parameters or not first:
            continue
        other = parameters[partner]
        # By value, as the server decides; where neither is zero, by their words.
        swapped = not bool(parameter.detach().any()) and bool(other.detach().any())
        drawn, trained = (partner, parameter) if swapped else (name, other)
        parameters[drawn].requires_grad_(False)
        frozen.append(drawn)
        if rank is not None:
            trained.register_hook(_first_columns(trained, parameters[drawn], rank))
    if not frozen:
        raise ConfigError(f"the model has no parameters with the words {words!r} of adapters in their names")
    return frozen


def _first_columns(trained: Any, drawn: Any, rank: int) -> Callable[[Any], Any]:
    """Return what sets a gradient to zero outside of the first ``rank`` columns."""
    whole, axis = _rank(tuple(trained.shape), tuple(drawn.shape))
    params.integer("rank", rank, low=1, high=whole)

    def masked(gradient: Any) -> Any:
        kept = gradient.clone()
        kept.narrow(axis, rank, whole - rank).zero_()
        return kept

    return masked
