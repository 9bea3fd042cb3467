"""Named arrays and Flower's ArrayRecords: conversion, comparison, and restoring the model's dtypes after
aggregation."""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import math
import mmap
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from tokenize import TokenError
from typing import Any, Final, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from numpy.typing import DTypeLike, NDArray

from fedcomp.adapters import Halves
from fedcomp.device import DeviceArray, uploaded
from fedcomp.errors import LayoutError
from fedcomp.flower._private import filled, make_array
from fedcomp.flower.payload import STYPE
from fedcomp.layout import finite
from fedcomp.wire import DENSE, Bf16, Expected, Limits, Planes, Tensor, decode, encode

_NUMPY: Final = "numpy.ndarray"
BFLOAT16: Final = "bfloat16"
"""Dtype of an Array that was made of an ``ml_dtypes`` array. numpy writes its values as two nameless bytes each."""

_HEADER: Final = 256
"""Longest header in the cache; numpy's header of a tensor has 128 bytes."""

_LARGE: Final = 1 << 22
"""Size of an array in bytes from which numpy also asks for large pages."""

_PACKED_FROM: Final = 1 << 16
"""Size of an array in bytes from which it is packed: of a smaller one next to nothing is saved."""

_PIECE: Final = 1 << 16
"""Number of values that are scanned at a time."""

Named = dict[str, NDArray[Any]]
Arrays = Mapping[str, NDArray[Any]]


class Place:
    """An array that lies where it stays: :meth:`array` returns it as Flower's without a copy.

    Parameters
    ----------
    shape : tuple of int
    dtype : dtype
        Of numbers.

    Attributes
    ----------
    values : ndarray
        To be filled; not to be written to any more once :meth:`array` was called.
    """

    def __init__(self, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        head, self._kind = _npy_header(shape, np.dtype(dtype))
        # As in C, bytes are filled before anybody else has seen them.
        self._data = bytes(len(head) + math.prod(shape) * np.dtype(dtype).itemsize)
        address = np.frombuffer(self._data, np.uint8).ctypes.data
        _advise(address, len(self._data))
        memory: Any = (ctypes.c_char * len(self._data)).from_address(address)
        # The bytes live for as long as something points into them.
        memory.owner = self._data
        memory[: len(head)] = head
        self.values: NDArray[Any] = np.frombuffer(memory, dtype, offset=len(head)).reshape(shape)

    def array(self) -> Array:
        """Return the values."""
        self.values.setflags(write=False)
        return make_array(self._kind, self.values.shape, _NUMPY, self._data)


class TensorArray(Array):
    """An Array that stays a tensor, where the tensor is, until somebody asks for its bytes.

    Whatever sends, stores or pickles it asks for them. Then it holds both.

    Parameters
    ----------
    tensor : torch.Tensor
        Detached and contiguous; not to be written to any more.
    """

    # Flower writes the name of the class into what it sends, and reads no other.
    __qualname__ = Array.__qualname__

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.__dict__.update(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape), stype=_NUMPY)

    @cached_property
    def data(self) -> bytes:  # type: ignore[override]  # an attribute of Flower's
        """The tensor's bytes, copied to the host."""
        values = np.asarray(DeviceArray(self.tensor))
        return (_bfloat16(values) if self.dtype == BFLOAT16 else _array(values)).data

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process may have no such device.
        return make_array, (self.dtype, self.shape, self.stype, self.data)


def size_of(array: Array) -> int:
    """Return the bytes of an array's data, to within a header; they are not made for that."""
    return int(array.tensor.nbytes) if isinstance(array, TensorArray) else len(array.data)


@lru_cache(1)
def _madvise() -> Callable[[int, int, int], int] | None:
    # Of Linux alone.
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return cast("Callable[[int, int, int], int]", call)


def _advise(address: int, size: int) -> None:
    """Ask the system for large pages, as numpy does for its own arrays. With small pages, filling fresh memory takes
    six times as long (measured)."""
    call, first = _madvise(), -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    if call is not None and size >= _LARGE:
        # It may refuse: then the memory is what it was.
        call(first, (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)


def to_record(arrays: Arrays, places: Sequence[Place] = ()) -> ArrayRecord:
    """Return the named arrays as an ArrayRecord, in order; those that are the values of ``places`` are not copied."""
    own = {id(place.values): place.array for place in places}
    return filled(
        ArrayRecord(),
        {name: own[id(array)]() if id(array) in own else _array(array) for name, array in arrays.items()},
    )


def _array(values: Any) -> Array:
    if isinstance(values, DeviceArray):
        return TensorArray(values.tensor)
    values = np.asarray(values)
    # np.save writes the header anew for every tensor, which for those of a small model is most of the work.
    if values.dtype.kind not in "biufc" or not values.flags.c_contiguous:
        return Array(values)
    if values.nbytes >= _LARGE:
        place = Place(values.shape, values.dtype)
        place.values[...] = values
        return place.array()
    head, kind = _npy_header(values.shape, values.dtype)
    # One copy of the data; tobytes() would be another.
    return make_array(kind, values.shape, _NUMPY, b"".join((head, values.data)))


# As many as those that _header keeps, and for the same reason.
@lru_cache(256)
def _npy_header(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[bytes, str]:
    """Return the ``.npy`` header of a C-contiguous array, and the dtype's name."""
    data = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        data, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    )
    return data.getvalue(), str(dtype)


def config_in(content: RecordDict, name: str) -> ConfigRecord:
    """Return the ConfigRecord called ``name``; an empty one where there is none."""
    # Not content.config_records: Flower makes a checked copy of it at every access.
    found = content.get(name)
    return found if isinstance(found, ConfigRecord) else ConfigRecord()


def record(state: Mapping[str, Any], *, stay: bool | None = None) -> ArrayRecord:
    """Return a state dict as an ArrayRecord, tensors of bfloat16 included, which Flower's own constructor refuses.

    Tensors on a GPU are copied there, and stay there until somebody asks for their bytes. The client half of a codec
    that works on devices (:attr:`fedcomp.codecs.base.Codec.on_device`) asks for none: it forms the update there.

    The server's model and all memories are float32 all the same, and an app rounds what it is given when it loads it:
    so changes below the spacing of bfloat16 add up over rounds.

    Parameters
    ----------
    state : mapping of str to torch.Tensor or array
    stay : bool, optional
        Whether tensors stay where they are; default: those that are on a device of type "cuda".
    """
    found: dict[str, Array] = {}
    for name, values in state.items():
        if hasattr(values, "detach") and (values.device.type == "cuda" if stay is None else stay):
            found[name] = TensorArray(values.detach().clone().contiguous())
            continue
        own, half = _plain(values)
        head, _ = _npy_header(own.shape, own.dtype)
        data = make_array(BFLOAT16, own.shape, _NUMPY, b"".join((head, _bytes(own)))) if half else _array(own)
        found[name] = data
    return filled(ArrayRecord(), found)


def tensors(record: ArrayRecord, device: Any) -> dict[str, Any]:
    """Return a record's tensors on a device, for ``model.load_state_dict``.

    The record keeps a copy there. What is trained from it is compared with that copy, and the model is not copied to
    the device a second time.

    Parameters
    ----------
    record : ArrayRecord
        Of a message, its values as they came: numpy's, or bfloat16 as :func:`record` writes it.
    device : torch.device or str
    """
    for name, array in list(record.items()):
        tensor = uploaded(_numbers(array, copy=False), device)
        if array.dtype == BFLOAT16:
            # Exact: every value is one of bfloat16.
            import torch

            tensor = tensor.to(torch.bfloat16)
        held = TensorArray(tensor)
        held.__dict__["data"] = array.data
        filled(record, {name: held})
    return {name: held.tensor.clone() for name, held in record.items() if isinstance(held, TensorArray)}


def base_digest(model: Any) -> str:
    """Return 32 hexadecimal digits that name the base model under a model's adapters: names, shapes, dtypes and values.

    It is compared and never sent in place of the model: with another base a client's adapters mean something else. The
    tensors are read where they lie; one on another device is copied here and dropped again.

    Parameters
    ----------
    model : torch.nn.Module
        Its parameters and buffers count, but for those that belong to adapters, and under its names without PEFT's.
    """
    found = hashlib.blake2b(digest_size=16)
    for name, values in model.state_dict().items():
        parts = name.removeprefix("base_model.model.").split(".")
        if any(part.startswith(("lora_", "modules_to_save", "trainable_tokens")) for part in parts):
            continue
        # PEFT puts the model and its layers some floors deeper.
        plain = ".".join(part for part in parts if part not in ("token_adapter", "base_layer", "original_module"))
        own, _ = _plain(values)
        found.update(f"{plain}\0".encode() + _npy_header(own.shape, own.dtype)[0])
        found.update(_bytes(own))
    return found.hexdigest()


def _plain(values: Any) -> tuple[NDArray[Any], bool]:
    """Return a tensor as an array, without a copy where it is in this machine's memory, and whether it is bfloat16,
    which is then in two nameless bytes each."""
    half = str(values.dtype).endswith(BFLOAT16)
    if not hasattr(values, "detach"):
        own = np.asarray(values)
        return own.view("V2") if half else own, half
    tensor = values.detach().cpu()
    # torch has no numpy array of bfloat16. Its bits are those of the integers of that size.
    return (tensor.view(sys.modules["torch"].int16).numpy().view("V2") if half else tensor.numpy()), half


def _bytes(values: NDArray[Any]) -> memoryview:
    """Return the bytes of an array in C order; a copy only where they lie in another one."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _bfloat16(values: NDArray[Any]) -> Array:
    """Return floats rounded to bfloat16; uint16 is taken as the words."""
    head, _ = _npy_header(values.shape, np.dtype("V2"))
    return make_array(BFLOAT16, values.shape, _NUMPY, head + Bf16(values).words.tobytes())


def packed(model: ArrayRecord) -> ArrayRecord:
    """Return a model in fewer bytes and without loss, the same tensors with entropy-coded exponents: each is a frame of
    :class:`~fedcomp.wire.Planes`, or as it was where that is not longer. :func:`unpacked` undoes it.
    """
    return filled(ArrayRecord(), {name: _packed(array) for name, array in model.items()})


def _packed(array: Array) -> Array:
    if array.stype != _NUMPY or len(array.data) < _PACKED_FROM:
        return array
    values = _as_written(array, copy=False)
    words = values.view(np.uint16) if array.dtype == BFLOAT16 and values.dtype.str == "|V2" else values
    # Neither numbers of another byte order nor such as no frame has: what is read is what was written, bit for bit.
    if not (words.dtype.isnative and Planes.accepts(words.dtype.name)):
        return array
    # The shape is the Array's own, whatever number of dimensions it has.
    frame = encode([Tensor(Planes(words), (words.size,), dtype=words.dtype.name)])
    return make_array(array.dtype, array.shape, STYPE, frame) if len(frame) < len(array.data) else array


def unpacked(model: ArrayRecord) -> ArrayRecord:
    """Return a model whose tensors may be packed with the tensors that were; itself where none is.

    Raises
    ------
    FedcompError
        When a packed tensor is damaged, or not what its Array says.
    """
    if all(array.stype != STYPE for array in model.values()):
        return model
    return filled(ArrayRecord(), {k: _unpacked(a, k) if a.stype == STYPE else a for k, a in model.items()})


def _unpacked(array: Array, name: str) -> Array:
    half, shape = array.dtype == BFLOAT16, tuple(array.shape)
    if any(length < 0 for length in shape):
        raise LayoutError(f"packed tensor {name!r} has the shape {shape}")
    # Its size is checked against the frame before anything is made of it.
    values = frozenset({Planes.name})
    expected = Expected(
        "", (math.prod(shape),), "uint16" if half else array.dtype, None, frozenset({DENSE}), None, values
    )
    bundle = decode(array.data, (expected,), Limits.for_schema((expected,), non_finite="allow"))
    found = bundle.tensors[0].values.decode().reshape(shape)
    return _bfloat16(found) if half else _array(found)


def completed(model: ArrayRecord, halves: Halves, seed: int) -> ArrayRecord:
    """Return a model with the halves of its adapters that are drawn.

    Raises
    ------
    LayoutError
        When they do not belong to this model.
    """
    drawn = halves.drawn({name: tuple(array.shape) for name, array in model.items()}, seed)
    return filled(ArrayRecord(), halves.placed(model, {name: _array(values) for name, values in drawn.items()}))


def without(model: ArrayRecord, halves: Halves) -> ArrayRecord:
    """Return what travels of a whole model: without the halves that are drawn, and in float32 what was shorter."""
    drawn = halves.names(list(model))
    kept = filled(ArrayRecord(), {name: array for name, array in model.items() if name not in drawn})
    wide = {
        name: _array(_numbers(a).astype(np.float32)) for name, a in kept.items() if a.dtype in (BFLOAT16, "float16")
    }
    return filled(ArrayRecord(), {**kept, **wide}) if wide else kept


def to_arrays(record: ArrayRecord, *, copy: bool = True, stay: bool = False) -> Named:
    """Return a record's tensors as new, writable arrays; without ``copy`` plain ones are read-only views, and with
    ``stay`` those that stayed on a device are :class:`~fedcomp.device.DeviceArray`, not to be written to.

    Tensors in bfloat16 are returned in float32, which holds every number of theirs.
    """
    found: Named = {}
    for name, array in record.items():
        lies: Any = DeviceArray(array.tensor) if stay and isinstance(array, TensorArray) else None
        found[name] = _numbers(array, copy) if lies is None else lies
    return found


def widened(record: ArrayRecord) -> ArrayRecord:
    """Return the record with its bfloat16 tensors in float32; itself where it has none."""
    if all(array.dtype != BFLOAT16 for array in record.values()):
        return record
    wide = {k: _array(_numbers(a)) if a.dtype == BFLOAT16 else a for k, a in record.items()}
    return filled(ArrayRecord(), wide)


def _numbers(array: Array, copy: bool = True) -> NDArray[Any]:
    found = _as_written(array, copy)
    if array.dtype != BFLOAT16 or found.dtype.str != "|V2":
        return found
    return Bf16(found.view(np.uint16).reshape(-1)).decode().reshape(found.shape)


def _as_written(array: Array, copy: bool) -> NDArray[Any]:
    # np.load reads a header as Python source, which for tensors of a small model is most of the work.
    data = array.data
    # Version 1.0 of npy: six bytes of magic, two of version, two that give the length of the header after them.
    end = 10 + int.from_bytes(data[8:10], "little")
    if array.stype == _NUMPY and data.startswith(b"\x93NUMPY\x01\x00") and end <= _HEADER:
        shape, fortran, dtype = _header(bytes(data[:end]))
        # The shape is the sender's word: nothing is made of it unless as many bytes are there.
        if not fortran and not dtype.hasobject and len(data) - end == math.prod(shape) * dtype.itemsize:
            view = np.frombuffer(data, dtype, offset=end).reshape(shape)
            return view.copy() if copy else view
    # Everything else is np.load's to read or to refuse.
    return array.numpy()


# A model's headers come again with every client and round; bounded in number and length, since anybody may send them.
@lru_cache(256)
def _header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    return np.lib.format.read_array_header_1_0(io.BytesIO(head[8:]))


def read_array(array: Array, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return a plain array that somebody sent, in ``dtype``; nothing is allocated that its header only claims.

    Raises
    ------
    LayoutError
        When it cannot be read, has another shape or another kind of elements.
    """
    wanted = np.dtype(dtype)
    if array.stype != _NUMPY:
        raise LayoutError(f"tensor {name!r} is serialised as {array.stype!r}, expected {_NUMPY!r}")
    data = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(data)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        found, _, kind = read_header(data)
        given = np.dtype(np.float32) if array.dtype == BFLOAT16 and kind.str == "|V2" else kind
        # Of the expected shape: the one in the header may claim anything.
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        if found != shape or not np.can_cast(given, wanted, "same_kind") or len(array.data) - data.tell() != size:
            raise LayoutError(f"tensor {name!r} is {kind}{found} in {len(array.data)} bytes, expected {wanted}{shape}")
        # A float64 may exceed float32: infinity is refused where finite values are asked for.
        with np.errstate(over="ignore"):
            return _numbers(array).astype(wanted, copy=False)
    except LayoutError:
        raise
    # numpy parses a header as a Python literal, and passes on what the parser raises.
    except (ValueError, TypeError, EOFError, SyntaxError, TokenError) as error:
        raise LayoutError(f"tensor {name!r} cannot be read: {error}") from error


def same_model(a: ArrayRecord, b: ArrayRecord) -> bool:
    """Whether two records hold the same model; strategies may copy what they are given."""
    # Identity first: most strategies put the very record into their messages, and comparing reads the whole model.
    return a is b or (
        list(a) == list(b)
        and all(a[k] is b[k] or (a[k].dtype, a[k].shape, a[k].data) == (b[k].dtype, b[k].shape, b[k].data) for k in a)
    )


def finite_where(record: ArrayRecord, model: Arrays) -> bool:
    """Whether every float tensor of ``record`` is finite wherever that of ``model`` is."""
    for name, array in record.items():
        value = _numbers(array, copy=False)
        if value.dtype.kind == "f" and not finite(value):
            before = model.get(name)
            # Models hold infinities on purpose (attention masks): only a new one is a fault.
            if before is None or np.isfinite(before[~np.isfinite(value)]).any():
                return False
    return True


def restore_dtypes(record: ArrayRecord, model: Arrays, sent: Sequence[Arrays]) -> ArrayRecord:
    """Return an aggregate with the model's own dtypes: averaging turns integer buffers into float64.

    A new record; an array that has the right dtype is in it as it is, the same object.

    Parameters
    ----------
    record : ArrayRecord
        What an aggregation returned.
    model : mapping
        The model before it, whose dtypes are wanted.
    sent : sequence of mappings
        The buffers every client sent. Where all agree their value is taken as it is: float64 cannot carry an integer
        above 2**53.
    """
    out: dict[str, Array] = {}
    for name, array in record.items():
        value, before = _numbers(array, copy=False), model.get(name)
        if before is None or value.dtype == before.dtype:
            out[name] = array
            continue
        if before.dtype.kind not in "iub":
            restored = value.astype(before.dtype)
        else:
            agreed = _agreed(name, sent)
            # The strategy may do more than average: the agreed value stands only where the aggregate is close to it.
            near = agreed is not None and np.allclose(value, agreed.astype(np.float64), rtol=1e-9, atol=0.5)
            restored = agreed.astype(before.dtype) if near and agreed is not None else to_integers(value, before.dtype)
        out[name] = _array(np.asarray(restored))
    return filled(ArrayRecord(), out)


def count_differing(a: NDArray[Any], b: NDArray[Any] | float) -> int:
    """Return how many values of ``a``, an array of one dimension, are not those of ``b``, another or one for all."""
    others = _pieces(b) if isinstance(b, np.ndarray) else itertools.repeat(b)
    return sum(int(np.count_nonzero(own != other)) for own, other in zip(_pieces(a), others, strict=False))


def _pieces(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield a one-dimensional array in parts that fit into the processor's cache together with their results."""
    for start in range(0, values.size, _PIECE):
        yield values[start : start + _PIECE]


def to_integers(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return float ``values`` rounded to an integer or boolean dtype, clipped to its range."""
    if dtype.kind == "b":
        # A mean of flags is their share of True; half rounds to even, which is False.
        return np.rint(values).astype(dtype)
    info = np.iinfo(dtype)
    rounded = np.rint(values)
    # The largest int64 is no float64: choosing the limits by comparison avoids the wrap of a cast.
    with np.errstate(invalid="ignore"):
        whole = rounded.astype(dtype)
    whole = np.where(rounded >= float(info.max), np.array(info.max, dtype), whole)
    return np.where(rounded <= float(info.min), np.array(info.min, dtype), whole)


def _agreed(name: str, sent: Sequence[Arrays]) -> NDArray[Any] | None:
    """Return the buffer if every client sent the same one, otherwise None."""
    first = sent[0].get(name) if sent else None
    if first is None or not all(np.array_equal(other[name], first) for other in sent):
        return None
    return first
