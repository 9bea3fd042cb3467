"""What a program's server half is told and told off for, beside what the contract of systems shows."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest

from fedcomp.codecs import QSGD, TopK
from fedcomp.layout import Layout, TensorSpec, Update
from fedcomp.program import Given, Mean, Now, Step
from fedcomp.rng import Key

LAYOUT = Layout(
    (TensorSpec("weight", (3,), "float32", 0, 3), TensorSpec("running_var", (2,), "float32", 3, 2)),
    (),
    ("weight", "running_var"),
)


def now(**options: Any) -> tuple[Now, list[str]]:
    notes: list[str] = []
    model = np.array([1.0, 1.0, 1.0, 0.5, 0.5], np.float32)
    return Now(1, (0, 1), LAYOUT, lambda: model, note=notes.append, **options), notes


def down(change: list[float], rate: float = 1.0) -> tuple[Any, list[str]]:
    here, notes = now()
    found = here.downward(Step((0, 1), change=np.array(change, np.float32)), rate)
    return None if found is None else found.vector.tolist(), notes


def test_a_sum_goes_down_times_the_servers_step_size() -> None:
    assert down([1.0, -2.0, 0.5, 0.25, 0.0]) == ([1.0, -2.0, 0.5, 0.25, 0.0], [])
    assert down([1.0, -2.0, 0.5, 0.25, 0.0], 0.5) == ([0.5, -1.0, 0.25, 0.125, 0.0], [])


def test_what_is_held_back_and_what_does_not_go_down_at_all_is_noted() -> None:
    held, (note,) = down([1.0, 0.0, 0.0, -0.75, 0.25])
    assert held == [1.0, 0.0, 0.0, 0.0, 0.25]
    assert "running_var" in note
    for wrong in (float("nan"), float("inf")):
        nothing, notes = down([wrong, 0.0, 0.0, 0.0, 0.0])
        assert nothing is None
        assert notes == ["the mean is not finite: the model is unchanged"]
    nothing, _ = down([3e38, 0.0, 0.0, 0.0, 0.0], 2.0)
    assert nothing is None


def test_a_sum_of_updates_needs_no_model() -> None:
    """A vector of the model is a pass over it and its size in memory, for nothing."""

    def start() -> Any:
        raise AssertionError("the model was asked for")

    here = replace(now()[0], start=start, rule=Mean())
    codec = TopK(density=0.5)
    update = Update(np.array([1.0, 0.0, 4.0, 0.0, 2.0], np.float32), LAYOUT)
    given = [Given(n, 1.0, codec.encode(update, None, here.key("uplink", n))[0]) for n in (0, 1)]
    step = here.total(codec, given)
    assert step.change[2] == 4.0


def test_halves_cannot_change_what_they_are_told() -> None:
    here, _ = now()
    for told in (here, Step((0,))):
        name = next(iter(vars(told)))
        with pytest.raises(FrozenInstanceError):
            setattr(told, name, None)


def test_streams_of_a_round_have_names() -> None:
    here, _ = now(seed=7)
    keys = {here.key("uplink", 0), here.key("uplink", 1), here.key("downlink", 0)}
    assert len(keys) == 3
    assert {(key.seed, key.round) for key in keys} == {(7, 1)}
    assert here.key("downlink") == Key(7, "downlink", 1, 0)


def test_what_is_decoded_to_be_measured_is_what_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each client; where one is refused the sum is made again without it, and is the same to the bit."""
    layout, codec = Layout.flat(512), QSGD(levels=7)
    rng = np.random.default_rng(5)
    frames = [codec.encode(Update(rng.normal(size=512).astype(np.float32), layout), {}, Key(0))[0] for _ in range(6)]
    given = [Given(node, 1.0 + node, frame) for node, frame in enumerate(frames)]
    decoded: list[int] = []
    kinds = {type(tensor.values) for frame in frames for tensor in codec.open(frame, layout).tensors}
    for kind in kinds:
        real = kind.decode
        monkeypatch.setattr(kind, "decode", lambda self, real=real: decoded.append(1) or real(self))

    def round_of(contributions: list[Given], rule: Mean) -> Step:
        seen = lambda node, codec, came: codec.norm(came, layout)  # noqa: E731
        now = Now(1, tuple(range(6)), layout, lambda: np.zeros(512, np.float32), rule=rule, seen=seen)
        step = now.total(codec, contributions)
        assert step is not None
        return step

    class Afterwards(Mean):
        adds = False

    at_once = round_of(given, Mean())
    assert len(decoded) == 6
    later = round_of(given, Afterwards())
    assert len(decoded) > 12, "the other way takes more, or this test shows nothing"
    assert at_once.change.tobytes() == later.change.tobytes()
    broken = [*given[:2], given[2]._replace(frame=given[2].frame[:-1]), *given[3:]]
    one, other = round_of(broken, Mean()), round_of(broken, Afterwards())
    assert one.consumed == other.consumed == (0, 1, 3, 4, 5)
    assert one.change.tobytes() == other.change.tobytes()
