"""Threshold: the level itself, empty and full frames. What it sends: test_sparsification_deterministic.py."""

from __future__ import annotations

import numpy as np
from codec_examples import sent, update

from fedcomp import wire
from fedcomp.codecs import Threshold
from fedcomp.codecs.feedback import ErrorFeedback
from fedcomp.layout import Layout, Update
from fedcomp.rng import Key

KEY = Key(3, "codec", round=1, partition=2)


def test_nothing_above_the_level_is_a_legal_empty_frame() -> None:
    layout = Layout.flat(5000)
    given = update(layout)
    frame, decoded = sent(Threshold(1e6), given)
    assert not decoded.any()
    assert wire.decode(frame).tensors[0].values.k == 0
    assert len(frame) < 60
    assert len(sent(Threshold(1e300), given)[0]) == len(frame)


def test_everything_above_the_level_is_taken_by_the_receiver() -> None:
    given = Update(np.full(2000, -3.0, np.float32), Layout.flat(2000))
    np.testing.assert_array_equal(sent(Threshold(2.0), given)[1], given.vector)
    np.testing.assert_array_equal(sent(Threshold(2.0, index="rice"), given)[1], given.vector)


def test_the_level_itself_does_not_travel_and_is_not_rounded_up() -> None:
    """|x| > v for the v that was given: 0.1 lies below float32(0.1), which therefore travels."""
    at = np.float32(0.1)
    assert float(at) > 0.1
    layout = Layout.flat(3)
    given = Update(np.array([at, np.nextafter(at, np.float32(0)), -at], np.float32), layout)
    np.testing.assert_array_equal(np.flatnonzero(sent(Threshold(0.1), given)[1]), [0, 2])
    assert not sent(Threshold(float(at)), given)[1].any()
    tiny = Update(np.array([1e-45, 0.0, -1e-45], np.float32), layout)
    np.testing.assert_array_equal(np.flatnonzero(sent(Threshold(1e-60), tiny)[1]), [0, 2])


def test_error_feedback_collects_what_stays_below() -> None:
    """Elements of 0.3 per round reach a level of 1 in the fourth round and are sent whole."""
    layout = Layout.flat(1100)
    codec = ErrorFeedback(Threshold(1.0))
    state = codec.init(layout)
    given = Update(np.full(layout.size, 0.3, np.float32), layout)
    counts = []
    for r in range(8):
        frame, state = codec.encode(given, state, KEY.at(round=r))
        counts.append(codec.support(frame, layout).size)
    assert counts == [0, 0, 0, 1100] * 2
