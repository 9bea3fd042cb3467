"""Tracing a model's inputs through its computation, to find the layers that see them.

A layer shows its inputs to whoever gets its factors. Which inputs are the examples themselves cannot be told from where
a layer stands: a skip connection, a concatenation or an embedding brings them to the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS: Final = {
    "mm": (0, 1),
    "addmm": (1, 2),
    "_addmm_activation": (1, 2),
    "bmm": (0, 1),
    "baddbmm": (1, 2),
    "mv": (0, 1),
    "addmv": (1, 2),
    "matmul": (0, 1),
    "linear": (0, 1),
    "convolution": (0, 1),
    "_convolution": (0, 1),
    "mkldnn_rnn_layer": (0, 1, 2),
}
"""By function, the arguments that are multiplied and summed over. All others are added to the product."""

_UNWRITTEN: Final = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted")
"""The results of these functions are written later by others, without torch noticing."""


class Following(TorchDispatchMode):
    """Knows, of every tensor, whether it may hold what a model was given, value by value.

    All tensors hold it, but for parameters and buffers of the model; products with a weight, summed over two values or
    more (linear maps, convolutions, recurrent cells); what torch fills itself; and what is computed of these alone. So
    what is added to, put beside, normalised, looked up, or selected by the examples still holds them, and so does what
    torch cannot see: what comes from NumPy, from compiled code or from another thread. A weight that copies its input,
    and what is written into torch's memory behind its back, cannot be told.

    Parameters
    ----------
    model : Module
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        # By address of the storage, which a weak reference keeps from being given to another one.
        self._weights: dict[int, StorageWeakRef] = {}
        self._free: dict[int, StorageWeakRef] = {}
        self.refresh()
        for buffer in model.buffers():
            _note(self._free, buffer)

    def refresh(self, *_: Any) -> None:
        """Take the model's parameters as they are now: steps may put others in their place."""
        for known in (self._weights, self._free):
            for address in [address for address, storage in known.items() if storage.expired()]:
                del known[address]
        for parameter in self._model.parameters():
            _note(self._weights, parameter)

    def holds_examples(self, tensor: Tensor) -> bool:
        """Whether a tensor may hold what the model was given."""
        address = _address(tensor)
        return address not in self._weights and address not in self._free

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run ``func``, and note what its results hold."""
        kwargs = kwargs or {}
        name = getattr(getattr(func, "overloadpacket", func), "__name__", "")
        given = list(_tensors((args, kwargs)))
        holds = [self.holds_examples(t) for t in given]
        weights = bool(given) and all(_address(t) in self._weights for t in given)
        free = (name not in _UNWRITTEN and not any(holds)) or self._mixes(name, args, given, holds)
        result = func(*args, **kwargs)
        for tensor in (*_tensors(result), *_written(func, args, kwargs)):
            address = _address(tensor)
            if not free:
                self._free.pop(address, None)
            elif address not in self._weights:
                _note(self._weights if weights else self._free, tensor)
        return result

    def _mixes(self, name: str, args: Any, given: list[Tensor], holds: list[bool]) -> bool:
        """Whether a function multiplies by a weight and adds nothing that depends on the examples."""
        places = _PRODUCTS.get(name)
        if places is None or len(args) <= max(places):
            return False
        factors = [args[place] for place in places]
        if not all(isinstance(factor, Tensor) for factor in factors):
            return False
        added = any(
            held for tensor, held in zip(given, holds, strict=True) if not any(tensor is factor for factor in factors)
        )
        weighed = any(_address(factor) in self._weights for factor in factors)
        # Over a single value a product is a multiple of the example.
        per_channel = factors[1].numel() // max(1, factors[1].shape[0])
        summed = per_channel if "conv" in name else factors[0].shape[-1]
        return weighed and not added and summed > 1


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory; 0 for a tensor without memory, which is never tracked."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return 0


def _note(known: dict[int, StorageWeakRef], tensor: Tensor) -> None:
    if address := _address(tensor):
        known[address] = StorageWeakRef(tensor.untyped_storage())


def _written(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments into which a function writes."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    values: Callable[[Any], Any] = dict(zip((a.name for a in schema.arguments), args, strict=False)).get
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(kwargs.get(argument.name, values(argument.name)))
