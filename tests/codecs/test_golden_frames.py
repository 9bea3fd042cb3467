"""Frames of every codec, kept as data, decode to the same bits for ever."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from golden_frames import KEY, LAYOUT, given, load

from fedcomp.codecs import get_codec, known

ENTRIES = load()


def _decoded(entry: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(entry["decoded"]), "<f4")


@pytest.mark.parametrize("entry", ENTRIES, ids=[repr(get_codec(e["config"])) for e in ENTRIES])
def test_golden_frame_decodes_to_the_same_bits(entry: dict[str, Any]) -> None:
    codec = get_codec(entry["config"])
    assert codec.decode(base64.b64decode(entry["frame"]), LAYOUT).tobytes() == _decoded(entry).tobytes()


@pytest.mark.parametrize("entry", ENTRIES, ids=[repr(get_codec(e["config"])) for e in ENTRIES])
def test_encoding_still_means_the_same(entry: dict[str, Any]) -> None:
    """What is selected, drawn and rounded for a key does not change; how it is packed may."""
    codec = get_codec(entry["config"])
    frame, _ = codec.encode(given(), codec.init(LAYOUT), KEY)
    assert codec.decode(frame, LAYOUT).tobytes() == _decoded(entry).tobytes()


def test_every_codec_has_golden_frames() -> None:
    ids = {e["config"]["id"] for e in ENTRIES}
    assert ids >= set(known())
    assert any(_decoded(e).any() for e in ENTRIES)
