"""Golden frames: encoded updates kept as data. ``python tests/codecs/golden_frames.py`` adds those that are missing.

An entry that is there is never written again: what was once sent must be decoded for ever.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from codec_examples import EXAMPLES

from fedcomp.codecs import Codec, get_codec
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.rng import Key

PATH = Path(__file__).with_name("golden.json")
KEY = Key(2026, "codec", round=4, partition=1)
LAYOUT = Layout(
    (TensorSpec("w", (30, 7), "float32", 0, 210), TensorSpec("b", (11,), "float32", 210, 11, 1.0)), (), ("w", "b")
)


def given() -> Update:
    """The update behind every golden frame: integers over 64, so that no library's rounding enters."""
    words = KEY.at(purpose="golden").bits(LAYOUT.size) % np.uint64(2001)
    return Update(((words.astype(np.float64) - 1000.0) / 64.0).astype(np.float32), LAYOUT)


def load() -> list[dict[str, Any]]:
    """Return the stored entries: ``config``, ``frame`` and ``decoded`` (both base64; float32 little-endian)."""
    return json.loads(PATH.read_text()) if PATH.exists() else []


def entry(codec: Codec) -> dict[str, Any]:
    """Encode and decode once."""
    frame, _ = codec.encode(given(), codec.init(LAYOUT), KEY)
    decoded = codec.decode(frame, LAYOUT).astype("<f4").tobytes()
    return {
        "config": codec.to_config(),
        "frame": base64.b64encode(frame).decode(),
        "decoded": base64.b64encode(decoded).decode(),
    }


if __name__ == "__main__":
    entries = load()
    have = [get_codec(e["config"]) for e in entries]
    entries += [entry(codec) for codec in EXAMPLES if codec not in have]
    PATH.write_text(json.dumps(entries, indent=1) + "\n")
    print(f"{len(entries)} golden frames, {len(entries) - len(have)} of them new")
