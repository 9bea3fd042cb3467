"""Serialisation of plain data without pickle, for snapshots and checkpoints.

Numbers, strings, bytes, lists, tuples, dictionaries, numpy arrays and Flower's records survive exactly, nested in
any way. The container is numpy's ``npz`` (a zip archive, each member with its CRC-32): one member per array plus one
JSON document that holds the structure. Anything that would need pickle is refused on writing and on reading.

What is read may be damaged or forged. Reading takes memory in proportion to the bytes that are there: members are
stored as they are, never deflated, an array is as long as its header says before it is made, and each member is used
once.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from tokenize import TokenError
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from fedcomp.errors import FedcompError

_MANIFEST: Final = "manifest"
_NPY: Final = ".npy"
_ENCRYPTED: Final = 1
_TAG: Final = "$"
LASTING: Final = "lasting"
"""The tag of a value that is written elsewhere."""

_ATOMS: Final = frozenset((type(None), bool, int, float, str))
"""Types that JSON stores directly."""

VERSION: Final = 1
"""Version of the container; a reader refuses newer ones."""


class StoreError(FedcompError, ValueError):
    """Stored data is damaged or of a foreign format, or a value cannot be stored."""


class Lasting:
    """A value that does not change any more, in the place of plain data.

    Where it is stored again and again it is written once (:mod:`fedcomp.flower.growing`); everywhere else it is what it
    holds. Another value is another object.

    Parameters
    ----------
    read : callable
        Returns the value, plain data without another of these in it.
    """

    __slots__ = ("__weakref__", "read")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lasting) and (self is other or self.read() == other.read())


def dumps(value: Any, kind: str) -> bytes:
    """Return ``value`` as bytes, labelled with ``kind`` so that files are not mixed up.

    Raises
    ------
    StoreError
        When ``value`` holds something that is not plain data; the message names where.
    """
    members: dict[str, NDArray[Any]] = {}
    document = {"format": "fedcomp.store", "version": VERSION, "kind": kind, "value": encode(value, members)}
    # Bytes as an array: npz holds nothing else.
    members[_MANIFEST] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **members)
    return buffer.getvalue()


def loads(data: bytes, kind: str) -> Any:
    """Return the value :func:`dumps` was given.

    Raises
    ------
    StoreError
        When the bytes are damaged, were written by a newer version, or hold another ``kind``.
    """
    try:
        members = _members(data, kind)
        # Taken out, so that no value can point at the manifest itself.
        document = json.loads(members.pop(_MANIFEST).tobytes())
        require_readable(document, kind, "fedcomp.store", VERSION)
    except StoreError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, OSError, TypeError) as error:
        raise StoreError(f"stored {kind} is damaged or not one: {error}") from error
    except RecursionError as error:
        raise StoreError(f"stored {kind} is nested deeper than anything that is stored; it is forged") from error
    except (NotImplementedError, RuntimeError) as error:  # zipfile on a damaged method or flag field
        raise StoreError(f"stored {kind} is damaged: {error}") from error
    with reading(f"stored {kind}"):
        return decode(document["value"], members.pop)


def require_readable(document: Mapping[str, Any], kind: str, form: str, newest: int) -> None:
    """Check what a document says of itself: its format, its kind, and a version that this release reads.

    Raises
    ------
    StoreError
        When it is another.
    KeyError
        When it does not say it.
    """
    label, version, found = document["format"], document["version"], document["kind"]
    if label != form or found != kind:
        raise StoreError(f"stored data is a {found!r} of format {label!r}, expected a {kind!r}")
    if not isinstance(version, int) or version > newest:
        raise StoreError(
            f"stored {kind} has version {version!r}, this release reads up to {newest}; use the release that wrote it"
        )


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn what goes wrong inside, where data have another structure than expected, into a :class:`StoreError`."""
    try:
        yield
    # These say what is wrong and what to do; a grid of another seed, for one, is no damaged file.
    except FedcompError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise StoreError(
            f"{what} has a damaged structure, or is of another release: {type(error).__name__}: {error}"
        ) from error


def _members(data: bytes, kind: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an archive by name. Sizes that the archive only claims are never allocated."""
    members: dict[str, NDArray[Any]] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise StoreError(
                    f"stored {kind} has a compressed member {entry.filename!r} ({entry.compress_size} bytes that claim "
                    f"to be {entry.file_size}); what this project writes is never compressed"
                )
            if entry.flag_bits & _ENCRYPTED or not entry.filename.endswith(_NPY):
                raise StoreError(f"stored {kind} has a member {entry.filename!r}, which is not an array of fedcomp")
        # Members may point at the same bytes: a small archive would then unpack to many times its size.
        if sum(entry.file_size for entry in entries) > len(data) or len({e.filename for e in entries}) < len(entries):
            raise StoreError(f"stored {kind} has members that overlap or share a name; it is damaged or forged")
        for entry in entries:
            members[entry.filename.removesuffix(_NPY)] = read_npy(archive.read(entry), entry.filename)
    return members


def read_npy(data: bytes, name: str) -> NDArray[Any]:
    """Return the array of an npy file, a copy that may be written to."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (SyntaxError, TokenError) as error:
        raise StoreError(f"array {name!r} has a damaged header: {error}") from error
    if dtype.hasobject:
        raise StoreError(f"array {name!r} holds Python objects; only numeric arrays are stored, and nothing is run")
    lengths: list[int] = list(shape)
    count, there = math.prod(lengths), len(data) - file.tell()
    # Elements of no bytes (dtype "V0") would agree with any count: an array of 2**60 of them from a header alone.
    if min(lengths, default=0) < 0 or there != count * dtype.itemsize or (count and not there):
        raise StoreError(f"array {name!r} claims to be {dtype}{shape}; its data have {there} bytes")
    flat = np.frombuffer(data, dtype, offset=file.tell(), count=count) if count else np.zeros(0, dtype)
    # frombuffer() gives a read-only view of the file's bytes, and moments and memories are written to.
    return flat.reshape(shape, order="F" if fortran else "C").copy(order="K")


def is_plain(value: Any) -> bool:
    """Return whether :func:`dumps` can store ``value``."""
    try:
        encode(value, {})
    except StoreError:
        return False
    return True


def _member(array: NDArray[Any], members: dict[str, NDArray[Any]]) -> str:
    name = f"m{len(members)}"
    members[name] = array
    return name


def encode(value: Any, members: dict[str, NDArray[Any]], once: Callable[[Lasting], Any] | None = None) -> Any:
    """Return a JSON-able description of ``value``; bulk data goes to ``members``.

    Parameters
    ----------
    once : callable, optional
        Returns what stands for a lasting value; default what it holds is written as anything else.

    Raises
    ------
    StoreError
        When ``value`` holds something that is not plain data; the message names where.
    """
    try:
        return _encode(value, members, once)
    except _NotPlainError as found:
        raise StoreError(f"value{''.join(reversed(found.path))} {found.why}") from None


class _NotPlainError(Exception):
    """A value that cannot be stored. Its path is built while the exception propagates, so it costs nothing
    otherwise."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.path: list[str] = []


def _encode(value: Any, members: dict[str, NDArray[Any]], once: Callable[[Lasting], Any] | None) -> Any:
    # The type itself: np.float64 is a float to isinstance, and would not return as what it was.
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Lasting):
        return _encode(value.read(), members, once) if once is None else once(value)
    if isinstance(value, bytes | bytearray):
        return {_TAG: "bytes", "at": _member(np.frombuffer(bytes(value), np.uint8), members)}
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise _NotPlainError("is an array of Python objects; only numeric arrays can be stored")
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {_TAG: kind, "at": _member(np.asarray(value), members)}
    if isinstance(value, list | tuple):
        items = [
            item if type(item) in _ATOMS else _inside(item, members, once, f"[{i}]") for i, item in enumerate(value)
        ]
        return {_TAG: "tuple", "items": items} if isinstance(value, tuple) else items
    if isinstance(value, Array):
        data = _member(np.frombuffer(value.data, np.uint8), members)
        return {_TAG: "Array", "dtype": value.dtype, "shape": list(value.shape), "stype": value.stype, "at": data}
    for cls in (ArrayRecord, MetricRecord, ConfigRecord, RecordDict, dict):
        if isinstance(value, cls):
            # Pairs, since JSON's keys are texts and a dictionary's may be anything.
            items = [
                [
                    key if type(key) in _ATOMS else _inside(key, members, once, f" has a key {key!r} that"),
                    item if type(item) in _ATOMS else _inside(item, members, once, f"[{key!r}]"),
                ]
                for key, item in value.items()
            ]
            return {_TAG: cls.__name__, "items": items}
    raise _NotPlainError(
        f"is a {type(value).__module__}.{type(value).__qualname__}, which is not plain data and cannot be "
        "stored without pickle; give its owner state_dict() and load_state_dict()"
    )


def _inside(value: Any, members: dict[str, NDArray[Any]], once: Callable[[Lasting], Any] | None, place: str) -> Any:
    try:
        return _encode(value, members, once)
    except _NotPlainError as found:
        found.path.append(place)
        raise


def decode(node: Any, take: Callable[[str], NDArray[Any]], lasting: Callable[[int], Any] | None = None) -> Any:
    """Return the value that :func:`encode` described.

    Parameters
    ----------
    take : callable
        Returns a member by its name, each once: what is told again and again would be copied again and again.
    lasting : callable, optional
        Returns a lasting value by its number, each once. Default: there are none.
    """
    if isinstance(node, list):
        return [decode(item, take, lasting) for item in node]
    if not isinstance(node, dict):
        return node
    tag = node[_TAG]
    if tag == "bytes":
        return take(node["at"]).tobytes()
    if tag == "array":
        return take(node["at"])
    if tag == "scalar":
        # Indexing with () turns an array without dimensions into numpy's scalar.
        return take(node["at"])[()]
    if tag == "Array":
        return Array(node["dtype"], tuple(node["shape"]), node["stype"], take(node["at"]).tobytes())
    if tag == LASTING and lasting is not None:
        return lasting(node["at"])
    if tag == "tuple":
        return tuple(decode(item, take, lasting) for item in node["items"])
    pairs = {decode(key, take, lasting): decode(item, take, lasting) for key, item in node["items"]}
    if tag == "dict":
        return pairs
    records = {cls.__name__: cls for cls in (ArrayRecord, MetricRecord, ConfigRecord, RecordDict)}
    if tag not in records:
        raise StoreError(f"stored data holds an unknown kind of value {tag!r}")
    return records[tag](pairs)


def lasting_at(number: int) -> dict[str, Any]:
    """Return what stands for a lasting value that is written elsewhere under a number."""
    return {_TAG: LASTING, "at": number}


def lasting_in(node: Any) -> set[int]:
    """Return the numbers of the lasting values that a description names."""
    if isinstance(node, list):
        return set().union(*map(lasting_in, node))
    if not isinstance(node, dict):
        return set()
    return {node["at"]} if node[_TAG] == LASTING else lasting_in(node.get("items", []))
