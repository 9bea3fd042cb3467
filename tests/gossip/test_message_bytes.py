"""The bytes of a message: eight of header, the rest is the algorithm's; nothing else than MessageError comes out."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.errors import ConfigError, NonFiniteUpdate
from fedcomp.gossip.errors import MessageError
from fedcomp.gossip.packet import (
    HEADER_BYTES,
    MessageFlag,
    pack,
    peek,
    put_real,
    put_scalars,
    take_real,
    take_scalars,
    unpack,
)
from fedcomp.rng import Key

GOLDEN = "785634120200030161"


def test_a_message_is_these_bytes_for_ever() -> None:
    message = pack(0x12345678, 65538, MessageFlag.RESYNC | MessageFlag.DIGEST, np.float32, b"a")
    assert message.hex() == GOLDEN
    header, body = unpack(message, most=1)
    assert header == (0x12345678, 2, MessageFlag.RESYNC | MessageFlag.DIGEST, np.dtype("float32"))
    assert bytes(body) == b"a"


def test_the_header_has_eight_bytes_and_counts_messages_modulo_65536() -> None:
    assert len(pack(0, 0, 0, "float64", b"")) == HEADER_BYTES == 8
    assert [peek(pack(0, seq, 0, "float64", b"")).seq for seq in (65535, 65536, 65537)] == [65535, 0, 1]


@pytest.mark.parametrize(
    "wrong",
    [{"iteration": 1 << 32}, {"iteration": -1}, {"seq": -1}, {"flags": 32}, {"dtype": "float16"}, {"dtype": "int64"}],
)
def test_what_no_header_can_hold_is_refused_at_the_sender(wrong: dict[str, object]) -> None:
    fields: dict[str, object] = {"iteration": 1, "seq": 1, "flags": 0, "dtype": "float32"}
    with pytest.raises(ConfigError):
        pack(**{**fields, **wrong}, body=b"")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "0 bytes"),
        (bytes(7), "7 bytes"),
        (bytes.fromhex("0000000000002001"), "flags 0x20"),
        (bytes.fromhex("0000000000000000"), "dtype 0"),
        (bytes.fromhex("0000000000000003"), "dtype 3"),
        (bytes.fromhex("0000000000000001") + bytes(5), "at most 4"),
        (bytes.fromhex("0000000000000002"), "float64"),
    ],
)
def test_bytes_that_are_no_message_are_refused_with_the_reason(payload: bytes, says: str) -> None:
    with pytest.raises(MessageError, match=says):
        unpack(payload, most=4, dtype=np.float32)


def test_random_bytes_are_a_message_or_a_message_error() -> None:
    draw = Key(1, "messages").generator()
    read = 0
    for _ in range(2000):
        payload = bytearray(draw.bytes(int(draw.integers(0, 14))))
        payload[7:8] = payload[7:8] and bytes((payload[7] & 3,))
        payload = bytes(payload)
        try:
            header, body = unpack(payload, most=4)
        except MessageError:
            continue
        read += 1
        assert pack(*header, bytes(body)) == payload
    assert read  # some of them are messages


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_vectors_travel_bit_for_bit_or_not_at_all(dtype: str) -> None:
    vector = np.array([0.0, -0.0, 1e-45, -3.4e38, 0.1], dtype)
    taken = take_real(put_real(vector), 5, dtype)
    assert taken.tobytes() == vector.tobytes()
    assert taken.flags.writeable
    with pytest.raises(MessageError, match="bytes"):
        take_real(put_real(vector), 4, dtype)
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(NonFiniteUpdate, match="1 non-finite"):
            put_real(np.array([1.0, bad], dtype))
        with pytest.raises(MessageError, match="1 of 2"):
            take_real(np.array([1.0, bad], dtype).tobytes(), 2, dtype)


def test_scalars_travel_as_float64_or_not_at_all() -> None:
    assert put_scalars(0.1, -2.0).hex() == "9a9999999999b93f00000000000000c0"
    assert take_scalars(put_scalars(0.1, -2.0), 2) == (0.1, -2.0)
    with pytest.raises(MessageError):
        take_scalars(bytes(15), 2)
    with pytest.raises(MessageError):
        take_scalars(np.array([np.nan]).tobytes(), 1)
    with pytest.raises(NonFiniteUpdate):
        put_scalars(float("inf"))
