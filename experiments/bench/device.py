"""An update that is formed, ranked and packed on a GPU, beside the ways over the host; the same bytes from all.

Without CUDA everything runs on torch's CPU device at a smaller size: the same code, the same comparison of bytes, and
times that say nothing of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from fedcomp.codecs import ErrorFeedback, TopK
from fedcomp.codecs.base import State
from fedcomp.device import DeviceArray
from fedcomp.errors import why_missing
from fedcomp.experiments.bench.readpass import layered
from fedcomp.layout import Layout, Update
from fedcomp.measuring import Bound, Case, Found, Row, Times, timed
from fedcomp.rng import Key

HUGE: Final = 100_000_000
SMALL: Final = 4_000_000
QUICK: Final = 200_000
DENSITY: Final = 0.01
ROUNDS: Final = 3

COPY: Final = "copy of the model to the host"
THERE: Final = "difference, selection and frame, on the device"
HERE: Final = "copy to the host, difference, selection and frame there"
GOAL: Final = "our goal: a frame takes less time than to fetch what it replaces"
BITS: Final = "exact: the tiers promise the same bits"


def cases(quick: bool) -> Iterator[Case]:
    """Yield the comparison of bytes and the times."""
    missing = why_missing("torch")
    if not missing:
        import torch

        there = torch.cuda.is_available()
        missing = "" if there else "torch sees no CUDA device"
        size = QUICK if quick else HUGE if there else SMALL
        bench = _Bench(size, torch.device("cuda" if there else "cpu"))
        for form in ("float32", "q2"):
            yield bench.bytes_of(form)
        yield bench.times(1 if quick else 5, missing)
        return
    yield Case(bounds=[Bound("frames that differ from the host's", "none", "<= 0", BITS, skipped=missing)])


class _Bench:
    """A model of one tensor before and after training, on the host and on a device."""

    def __init__(self, size: int, device: Any) -> None:
        import torch

        self.layout = Layout.of({"w": np.zeros(size, np.float32)})
        self.before = layered(size)
        self.after = self.before + layered(size, 1) / np.float32(64)
        self.there: dict[str, Any] = {"w": DeviceArray(torch.tensor(self.after, device=device))}
        self.origin: dict[str, Any] = {"w": DeviceArray(torch.tensor(self.before, device=device))}
        self.device = str(device)

    def encoded(self, codec: ErrorFeedback, state: State, number: int, *, there: bool) -> tuple[bytes, State]:
        """Return the frame of a round and the state after it, formed on the device or, after a copy, on the host."""
        if there:
            change = self.layout.difference(self.there, self.origin)
        else:
            change = self.layout.difference({"w": np.asarray(self.there["w"])}, {"w": self.before})
        return codec.encode(Update(change, self.layout, given=True), state, Key(0, round=number))

    def bytes_of(self, form: str) -> Case:
        """Return the case of rounds in which frames and memories of both ways are compared."""
        codec, name = ErrorFeedback(TopK(DENSITY, values=form)), f"frames and memories that differ, {form}"

        def measure(found: Found) -> Iterator[Row]:
            here = there = codec.init(self.layout)
            differ, size = 0, 0
            for number in range(1, ROUNDS + 1):
                wanted, here = self.encoded(codec, here, number, there=False)
                frame, there = self.encoded(codec, there, number, there=True)
                differ += frame != wanted
                differ += not np.array_equal(
                    np.asarray(there["memory"]).view(np.int32), np.asarray(here["memory"]).view(np.int32)
                )
                size = len(frame)
                if number == 1:
                    here = codec.rollback(here, wanted, self.layout)
                    there = codec.rollback(there, frame, self.layout)
            yield {"n": self.layout.size, "device": self.device, "values": form, "bytes": size, "differ": differ}

        bound = Bound(name, ("differ", {"values": form}), "<= 0", BITS, sure=True)
        return Case(f"{ROUNDS} rounds of {self.layout.size:,} values, {form}", measure, [bound])

    def times(self, repetitions: int, missing: str) -> Case:
        """Return the case of the three ways, each with a memory that has settled."""
        codec = ErrorFeedback(TopK(DENSITY))
        states = dict.fromkeys((True, False), codec.init(self.layout))

        def encode(there: bool) -> None:
            _, states[there] = self.encoded(codec, states[there], 1, there=there)

        for there in (True, False) * 2:
            encode(there)
        calls: dict[str, Callable[[], object]] = {
            COPY: partial(np.asarray, self.there["w"]),
            THERE: partial(encode, True),
            HERE: partial(encode, False),
        }

        def row(times: Times, method: str) -> Row:
            taken = round(1e3 * times.median(method), 3)
            return {"n": self.layout.size, "device": self.device, "method": method, "milliseconds": taken}

        faster = Bound(f"{THERE}: over a copy of the model", f"{THERE} / {COPY}", "<= 1", GOAL, False, skipped=missing)
        return timed(f"times of {self.layout.size:,} values", calls, repetitions, row, [faster])
