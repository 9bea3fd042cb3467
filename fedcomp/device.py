"""Arrays in the memory of a device, such as a GPU, for code that is written for numpy.

A :class:`DeviceArray` wraps a torch tensor. The few operations that the client's path needs run where the tensor is:
elementwise arithmetic, slices, and reductions to one number. What is taken by an array of indices comes to the host,
since it is few values. Other functions of numpy raise a TypeError: they would copy a model over the bus, and nobody
would notice. ``np.asarray`` copies a whole array; its result cannot be written to.

Elementwise operations are those of IEEE arithmetic, each rounded by itself, so that results have the bits of numpy's.
Sums have not: they are for reports, and for finding what is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray

_UFUNCS: Final[Mapping[Any, str]] = {
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.equal: "eq",
    np.absolute: "abs",
    np.isfinite: "isfinite",
    np.invert: "logical_not",
}
"""By numpy's function, torch's of the same result."""


class DeviceArray(NDArrayOperatorsMixin):
    """A torch tensor that numpy code meets as an array.

    Parameters
    ----------
    tensor : torch.Tensor
        Detached. bfloat16 is widened to float32, which holds every number of it.

    Examples
    --------
    >>> import torch
    >>> held = DeviceArray(torch.tensor([1.0, -2.0, 3.0]))
    >>> held += np.float32([1, 1, 1])
    >>> held[1:].shape, held[np.array([0, 2])]
    ((2,), array([2., 4.], dtype=float32))
    """

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of its elements."""
        return np.dtype(str(self.tensor.dtype).removeprefix("torch."))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        """The number of its axes."""
        return int(self.tensor.ndim)

    @property
    def size(self) -> int:
        """The number of its elements."""
        return int(self.tensor.numel())

    @property
    def bits(self) -> DeviceArray:
        """The bits of float32 elements, as int32."""
        import torch

        return DeviceArray(self.tensor.view(torch.int32))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all elements on the host. Not to be written to, unless ``copy`` asks for an array of the caller's."""
        found: NDArray[Any] = self.tensor.cpu().numpy()
        if copy:
            return np.array(found, dtype)
        # What is written to a copy would be lost.
        found.flags.writeable = False
        return found if dtype is None else found.astype(dtype, copy=False)

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind"
    ) -> Any:
        import torch

        # Tensors of one model may be on several devices; the result's decides.
        given = [_operand(each, device_of([*(out or ()), self]), dtype) for each in inputs]
        if method != "__call__" or ufunc not in _UFUNCS or any(each is NotImplemented for each in given):
            return NotImplemented
        operation: Callable[..., Any] = getattr(torch, _UFUNCS[ufunc])
        # torch wants the tensor first where the other operand is a number.
        if len(given) == 2 and not isinstance(given[0], torch.Tensor):
            given[0] = torch.full_like(given[1], given[0])
        if out is None:
            return DeviceArray(operation(*given))
        if not isinstance(out[0], DeviceArray):
            return NotImplemented
        operation(*given, out=out[0].tensor)
        return out[0]

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function not in _FUNCTIONS or kwargs:
            return NotImplemented
        return _FUNCTIONS[function](*(_operand(each, self.tensor.device, None) for each in args))

    def __getitem__(self, where: Any) -> Any:
        """Return a part: a view for slices, an array on the host for an array of indices."""
        if isinstance(where, np.ndarray):
            return DeviceArray(self.tensor[uploaded(where, self.tensor.device)]).__array__(copy=True)
        return DeviceArray(self.tensor[where])

    def __setitem__(self, where: Any, values: Any) -> None:
        place = uploaded(where, self.tensor.device) if isinstance(where, np.ndarray) else where
        self.tensor[place] = _operand(values, self.tensor.device, None)

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the elements in another shape; a view where they are contiguous."""
        return DeviceArray(self.tensor.reshape(*shape))

    def copy(self) -> DeviceArray:
        """Return a copy on the same device."""
        return DeviceArray(self.tensor.clone())

    def any(self) -> bool:
        """Whether an element differs from zero."""
        return bool(self.tensor.any())

    def sum(self, dtype: Any = None) -> float:
        """Return the sum, added up in ``dtype``; the order of the additions is the device's."""
        return float(self.tensor.sum(dtype=None if dtype is None else _torch_dtype(dtype)))

    def max(self, initial: float) -> float:
        """Return the largest element, ``initial`` if that is larger."""
        return max(initial, float(self.tensor.max())) if self.size else initial

    def nearest(self, dtype: str) -> DeviceArray:
        """Return the elements rounded to a shorter float of torch's, as float32."""
        import torch

        return DeviceArray(self.tensor.to(getattr(torch, dtype)).float())


_FUNCTIONS: Final[Mapping[Any, Callable[..., Any]]] = {
    np.array_equal: lambda first, second: bool(first.equal(second)),
    np.count_nonzero: lambda tensor: int(tensor.count_nonzero()),
    np.empty_like: lambda tensor: DeviceArray(tensor.new_empty(tensor.shape)),
    np.where: lambda condition, first, second: DeviceArray(first.where(condition, second)),
    np.zeros_like: lambda tensor: DeviceArray(tensor.new_zeros(tensor.shape)),
}
"""By numpy's function, the same of tensors on one device."""


def uploaded(values: NDArray[Any], device: Any) -> Any:
    """Return a tensor of an array's elements on ``device``, always a copy."""
    import torch

    return torch.tensor(values, device=device)


def _operand(value: Any, device: Any, dtype: Any) -> Any:
    """Return what torch computes with: a tensor on ``device``, or a number; NotImplemented for anything else."""
    if isinstance(value, DeviceArray):
        found = value.tensor.to(device)
    elif isinstance(value, np.ndarray):
        found = uploaded(value, device)
    # A float64 of numpy makes a float64 array of its product with a float32 one, which a number of torch does not.
    elif isinstance(value, np.float32) or (isinstance(value, int | float) and not isinstance(value, np.generic)):
        return float(value)
    else:
        return NotImplemented
    return found if dtype is None else found.to(_torch_dtype(dtype))


def _torch_dtype(dtype: Any) -> Any:
    import torch

    return getattr(torch, np.dtype(dtype).name)


def room_beside(arrays: Iterable[Any], size: int) -> Any:
    """Return an uninitialised float32 vector of ``size`` where the first array on a device is; else on the host."""
    device = device_of(arrays)
    if device is None:
        return np.empty(size, np.float32)
    import torch

    return DeviceArray(torch.empty(size, dtype=torch.float32, device=device))


def device_of(arrays: Iterable[Any]) -> Any:
    """Return the device of the first array that is on one; None where all are on the host."""
    return next((each.tensor.device for each in arrays if isinstance(each, DeviceArray)), None)


def on_host(array: Any) -> Any:
    """Return what is not on a device as it is, and of an array on one a copy."""
    return np.array(array) if isinstance(array, DeviceArray) else array


def beside(array: Any, other: Any) -> Any:
    """Return ``array`` where ``other`` is: itself, or a copy."""
    device = device_of([other])
    if device is None:
        return on_host(array)
    if isinstance(array, DeviceArray) and array.tensor.device == device:
        return array
    return DeviceArray(_operand(array, device, None))
