"""Frames of every codec, kept as data, decode to the same bits for ever."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_frames import KEY, LAYOUT, given, load

from fedcomp.codecs import Clip, Factors, TopK, chain, get_codec, known
from fedcomp.codecs.feedback import ErrorFeedback

ENTRIES = load()

LOOSELY_CLIPPED = (chain(Clip(0.5), TopK(0.1)), chain(Clip(2.0), ErrorFeedback(TopK(0.1))))
"""Encoded when rounding could still carry Clip over its bound. Their frames decode as ever; what is encoded now is a
few units in the last place shorter, and chain(Clip(0.75), ...) pins those bits."""

UNBALANCED = (Factors(rank=3, iterations=1, theta=0.0, solver="power", values="q8"),)
"""Encoded when one side of factors could be so much smaller than the other that nothing was left of it. Both are as
large as each other now, and their last bits are rounded otherwise."""


def _decoded(entry: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(entry["decoded"]), "<f4")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=[repr(get_codec(e["config"])) for e in ENTRIES])
def test_golden_frame_decodes_to_the_same_bits(entry: dict[str, Any]) -> None:
    codec = get_codec(entry["config"])
    assert codec.decode(base64.b64decode(entry["frame"]), LAYOUT).tobytes() == _decoded(entry).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=[repr(get_codec(e["config"])) for e in ENTRIES])
def test_encoding_still_means_the_same(entry: dict[str, Any]) -> None:
    """What is selected, drawn and rounded for a key does not change; how it is packed may."""
    codec = get_codec(entry["config"])
    frame, _ = codec.encode(given(), codec.init(LAYOUT), KEY)
    if codec in LOOSELY_CLIPPED:
        np.testing.assert_allclose(codec.decode(frame, LAYOUT), _decoded(entry), rtol=2.0**-22)
    elif codec in UNBALANCED:
        exact = replace(codec, values="float32")
        meant = exact.decode(exact.encode(given(), {}, KEY)[0], LAYOUT)
        off, before = (np.linalg.norm(d - meant) for d in (codec.decode(frame, LAYOUT), _decoded(entry)))
        assert off <= 0.2 * before
    else:
        assert codec.decode(frame, LAYOUT).tobytes() == _decoded(entry).tobytes()


def test_every_codec_has_golden_frames() -> None:
    ids = {e["config"]["id"] for e in ENTRIES}
    assert ids >= set(known())
    assert any(_decoded(e).any() for e in ENTRIES)
