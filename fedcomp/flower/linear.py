"""What coded gradient descent and its clients exchange: message types, headers, vectors as checked bytes.

Three kinds of messages. ``query.coded_setup`` comes in stages: *join* (who are you, what do you hold, your labels),
*share* (send your partition to these devices), *build* (make and keep your combination). ``train.coded_phase1`` carries
the model down and margins up, ``train.coded_phase2`` the projected residuals down and the parts of the gradient up.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Annotated, Final

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from numpy.typing import NDArray

from fedcomp.flower.payload import PayloadError, put_frame, take_frame
from fedcomp.flower.schema import MOST_VALUES, Schema
from fedcomp.rules import Data, Flag, Int, Many, OneOf, Text

SETUP: Final = "coded_setup"
PHASE1: Final = "coded_phase1"
PHASE2: Final = "coded_phase2"
"""Actions of the messages; their types are ``query.coded_setup``, ``train.coded_phase1`` and ``train.coded_phase2``."""

JOIN: Final = "join"
SHARE: Final = "share"
BUILD: Final = "build"
"""Stages of the set-up."""

HEADER: Final = "fedcomp.linear"
"""Name of the ConfigRecord that every message and reply has."""

TARGETS: Final = "fedcomp.linear.targets"
"""Name of the ConfigRecord that says to which devices, and where, a partition goes."""

MODEL: Final = "fedcomp.linear.model"
MARGINS: Final = "fedcomp.linear.margins"
RESIDUALS: Final = "fedcomp.linear.residuals"
GRADIENT: Final = "fedcomp.linear.gradient"
LABELS: Final = "fedcomp.linear.labels"
ROW: Final = "fedcomp.linear.row"
PARTITION: Final = "fedcomp.linear.partition"
"""Names of the frames."""

VECTOR_TYPES: Final = ("float64", "float32")
"""Types in which vectors of the two phases may travel."""

DIGEST: Final = 16
"""Bytes of the digest by which an owner says which examples it has."""

PLAN: Final = 8
"""Bytes of a plan's name."""

MOST_DEVICES: Final = 1 << 20
"""Devices a plan may have."""

_CHECK: Final = 4


Plan = Annotated[bytes, Data(PLAN, least=PLAN)]
Sizes = Annotated[tuple[int, ...], Many(Int(), MOST_DEVICES)]
Switch = Annotated[bool, Flag()]
Marked = Annotated[bool, Flag(absent=False)]
Address = Annotated[str, Text(4096)]


@dataclass(frozen=True, kw_only=True)
class Join(Schema, key=HEADER):
    """Who are you, what do you hold?

    Attributes
    ----------
    partitions : int
        Devices with numbers below it own the partition of that number.
    labels : bool
        Owners are to send theirs.
    peers, spool : bool, str
        Partitions travel between devices; folder of simulated links.
    """

    stage: Annotated[str, OneOf(JOIN)] = JOIN
    partitions: Annotated[int, Int(1, MOST_DEVICES)]
    labels: Switch
    peers: Marked = False
    spool: Address = ""


@dataclass(frozen=True, kw_only=True)
class Share(Schema, key=HEADER):
    """Send your partition for the plan of this id."""

    stage: Annotated[str, OneOf(SHARE)] = SHARE
    partitions: Annotated[int, Int(1, MOST_DEVICES)]
    plan: Plan
    peers: Marked = False
    spool: Address = ""


@dataclass(frozen=True, kw_only=True)
class Build(Schema, key=HEADER):
    """Make and keep your combination.

    Attributes
    ----------
    sizes : tuple of int
        Rows of each partition.
    columns : int
        Of all of them, without the constant one that ``bias`` adds.
    """

    stage: Annotated[str, OneOf(BUILD)] = BUILD
    plan: Plan
    sizes: Annotated[tuple[int, ...], Many(Int(most=2**31 - 1), MOST_DEVICES, least=1)]
    columns: Annotated[int, Int(1, 2**31 - 1)]
    bias: Switch
    peers: Marked = False
    spool: Address = ""

    def conflict(self) -> str:
        # A combination is as long as the longest partition, whichever of them go into it.
        return _too_large(max(self.sizes), self.columns)


@dataclass(frozen=True)
class Targets(Schema, key=TARGETS):
    """To which devices a partition goes, and where they are reached; through the server they have no address."""

    to: Sizes
    addresses: Annotated[tuple[str, ...], Many(Text(4096), MOST_DEVICES)] = ()

    def conflict(self) -> str:
        wrong = self.addresses and len(self.addresses) != len(self.to)
        return f"{len(self.addresses)} addresses of {len(self.to)} devices" if wrong else ""


@dataclass(frozen=True)
class Phase(Schema, key=HEADER):
    """Multiply: ``type`` is that of the vectors of both directions."""

    plan: Plan
    type: Annotated[str, OneOf(*VECTOR_TYPES)]


@dataclass(frozen=True, kw_only=True)
class Joined(Schema, key=HEADER, separator="-"):
    """Which device answers: the plan it holds rows of, and where peers reach it; empty where there is none."""

    plan: Annotated[bytes, Data(PLAN)] = b""
    address: Annotated[str, Text()] = ""


@dataclass(frozen=True, kw_only=True)
class Owner(Joined):
    """What an owner adds to it.

    Attributes
    ----------
    rows, columns : int
        Of its partition.
    loss : str
    data : bytes
        Tells apart data of which all that the server sees is equal.
    label_type : {"", "int8", "float64"}
        Of the labels that come along.
    """

    rows: Annotated[int, Int(most=2**31 - 1)]
    columns: Annotated[int, Int(1, 2**31 - 1)]
    loss: Annotated[str, Text(64)]
    data: Annotated[bytes, Data(DIGEST, least=DIGEST)]
    label_type: Annotated[str, OneOf("", "int8", "float64")] = ""

    def conflict(self) -> str:
        # What one owner states decides how much every device holds.
        return super().conflict() or _too_large(self.rows, self.columns)


@dataclass(frozen=True, kw_only=True)
class Done(Schema, key=HEADER):
    """How a device answers everything else.

    Attributes
    ----------
    plan : bytes
        Whose rows it used or made.
    sent : tuple of int
        Bytes it handed over, to one receiver after the other.
    unready : bool
        It holds no rows of the plan; an ordinary answer, and the server sets the device up again.
    """

    plan: Annotated[bytes, Data(PLAN)] = b""
    sent: Sizes = ()
    unready: Marked = False

    def conflict(self) -> str:
        # A device that holds nothing may know no plan to name.
        return "" if self.unready else _no_plan(self.plan)


@dataclass(frozen=True)
class HeldPlan(Schema, key="fedcomp.linear.plan"):
    """Whose rows a device holds in its state."""

    plan: Plan


def take_stage(message: Message) -> Join | Share | Build:
    """Return what a message of the set-up asks.

    Raises
    ------
    SchemaError
        When it does not come from coded gradient descent, or asks something else.
    """
    header = message.content.get(HEADER) if message.has_content() else None
    stage = header.get("stage") if isinstance(header, ConfigRecord) else None
    kinds: dict[object, type[Share] | type[Build]] = {SHARE: Share, BUILD: Build}
    # Anything else is read as a join, which refuses it by the name of the field.
    return kinds[stage].take(message) if stage in (SHARE, BUILD) else Join.take(message)


def _too_large(rows: int, columns: int) -> str:
    return f"{rows} rows of {columns} columns: more than {MOST_VALUES} numbers" if rows * columns > MOST_VALUES else ""


def _no_plan(plan: bytes) -> str:
    return "" if len(plan) == PLAN else f"the name of a plan has {PLAN} bytes, not {len(plan)}"


def put_vector(content: RecordDict, name: str, vector: NDArray[np.float64], dtype: str) -> None:
    """Store a vector as ``dtype`` ("float64", "float32" or "int8") with a crc32 behind it."""
    # Little-endian on every machine, as are the bytes under the checksum.
    body = np.ascontiguousarray(vector, np.dtype(dtype).newbyteorder("<")).tobytes()
    put_frame(content, name, body + zlib.crc32(body).to_bytes(_CHECK, "little"))


def take_vector(content: RecordDict, name: str, size: int, dtype: str) -> NDArray[np.float64]:
    """Return the vector of ``size`` elements that :func:`put_vector` stored, as float64.

    Raises
    ------
    PayloadError
        When there is none, or it has another size, was damaged, or is not finite.
    """
    data = take_frame(content, name)
    kind = np.dtype(dtype).newbyteorder("<")
    if data is None or len(data) != size * kind.itemsize + _CHECK:
        found = "nothing" if data is None else f"{len(data)} bytes"
        raise PayloadError(f"{found} under {name!r}, expected {size} numbers of type {dtype} and a checksum")
    body = data[:-_CHECK]
    if zlib.crc32(body) != int.from_bytes(data[-_CHECK:], "little"):
        raise PayloadError(f"the numbers under {name!r} were damaged on the way: their checksum differs")
    vector = np.frombuffer(body, kind).astype(np.float64)
    # Here and not later: a NaN passes the decoder's comparisons with a largest misfit.
    if not np.isfinite(vector).all():
        raise PayloadError(f"the numbers under {name!r} are not all finite")
    return vector
