"""LGC as a program: its stages, what travels in them, and forged latents."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from beside_product import Seen, Toy, everybody, faults, no_fault, program

from fedcomp.codecs import LGC, ErrorFeedback, ScaleCom, TopK
from fedcomp.codecs.autoencoder import ConvEncoder, IdentityDecoder, IdentityEncoder, latents
from fedcomp.codecs.scalecom import open_support
from fedcomp.errors import ConfigError
from fedcomp.layout import EndsDense
from fedcomp.local import Local
from fedcomp.program import Ask, Me, Now
from fedcomp.rng import Key
from fedcomp.systems.autoencoder import half_of
from fedcomp.systems.lgc import LearnedGradients, Scale
from fedcomp.systems.pair import Pair
from fedcomp.systems.shared_support import SharedSupport

TOY = Toy({"first": (20, 20), "second": (40, 30), "third": (30, 30), "last": (20, 30), "bias": (12,)}, EndsDense())
ROOT = Path(__file__).parents[2]
STAGES = {"warmup_rounds": 2, "training_rounds": 3}
"""Rounds 1 and 2 are dense, 3 to 5 train the autoencoder, latents travel from round 6 on."""


def codec(**options: Any) -> LGC:
    return LGC(**{"density": 0.05, "innovation": 0.005, **options})


def learned(
    *, training: dict | None = None, common: str = "turn", server_lr: float = 1.0, **options
) -> LearnedGradients:
    return LearnedGradients(codec(**options), **STAGES, common=common, server_lr=server_lr, training=training or {})


def run(local: Local, rounds: int, since: int = 1) -> list[int]:
    """Return how many nodes were in each round."""
    steps = [local.step(number) for number in range(since, since + rounds)]
    return [0 if step is None else len(step.consumed) for step in steps]


class Identity(LearnedGradients, id="lgc-identity"):
    """Whose autoencoder leaves values as they are."""

    def _stage(self, now: Now) -> Any:
        known, _, _ = super()._stage(now)
        if now.number <= self.warmup_rounds + self.training_rounds:
            return known, IdentityEncoder(), {None: IdentityDecoder()}
        return replace(known, encoder=IdentityEncoder.id), IdentityEncoder(), {None: IdentityDecoder()}


def models(seen: list[Seen]) -> list[bytes]:
    return [each.model for each in seen]


@pytest.mark.parametrize("ef", ["mask", "decoded"])
def test_a_ring_with_an_identity_is_scalecom(ef: str) -> None:
    """Models and what is remembered, bit for bit: the oracle of stages, supports and turns."""
    how = {"fault": faults(0.1), "present": everybody(4, 6), "toy": TOY}
    ours, _ = program(Identity(codec(ef=ef), 2, 0), 4, 6, **how)
    theirs, _ = program(SharedSupport(ScaleCom(0.05), 2), 4, 6, **how)
    assert models(ours) == models(theirs)
    assert [m["memory"] for m in ours[-1].memories.values()] == [m["memory"] for m in theirs[-1].memories.values()]


def test_a_server_whose_innovations_are_all_of_top_k_is_the_pair() -> None:
    """The innovation decodes to itself: each client's own top-k with error feedback."""
    how = {"fault": no_fault, "present": everybody(4, 4), "toy": TOY}
    ours, _ = program(Identity(codec(instance="server", ef="decoded", innovation=0.05), 0, 0), 4, 4, **how)
    theirs, _ = program(Pair(ErrorFeedback(TopK(0.05, scope="layer"))), 4, 4, **how)
    assert models(ours) == models(theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "encoders", "decoders"),
    [
        ({"instance": "ring"}, 4, 0),
        ({"instance": "ring", "ef": "decoded"}, 4, 4),
        ({"instance": "server", "common": "first"}, 1, 0),
        ({"instance": "server", "common": "first", "ef": "decoded"}, 1, 4),
        ({"instance": "server"}, 2, 0),
    ],
    ids=str,
)
def test_weights_go_once_to_each_node_that_needs_them(options: dict, encoders: int, decoders: int) -> None:
    local = TOY.local(learned(**options))
    run(local, 5)
    before = local.bytes_down
    run(local, 2, since=6)
    # Supports, and latents to three clients that decode them.
    rest = local.bytes_down - before - encoders * 692_172 - decoders * 174_908
    assert 0 < rest < 5000


@pytest.mark.slow
def test_a_last_stage_waits_for_a_first_step_of_training() -> None:
    local = TOY.local(LearnedGradients(codec(), 0, 0))
    run(local, 1)
    first = max(len(a.frames.get("values", b"")) for a in local.answers)
    assert "halves" in local.state
    run(local, 1, since=2)
    assert max(len(a.frames.get("values", b"")) for a in local.answers) < first


def test_too_few_values_train_nothing_and_travel_as_they_are() -> None:
    local = TOY.local(LearnedGradients(codec(raw=9), 0, 1))
    assert run(local, 3) == [4, 4, 4]
    assert not local.state


def changed(change: Any, **options: Any) -> Local:
    """Return a driver whose node 2, which leads round 7, answers what ``change`` makes of its answers."""

    class Liar(LearnedGradients, id="liar"):
        def client(self, memory, ask: Ask, me: Me) -> tuple:
            after, answer = super().client(memory, ask, me)
            return after, change(answer) if me.node == 2 and me.number == 7 and "support" in answer.frames else answer

    return TOY.local(Liar(codec(**options), **STAGES))


FORGED = {
    "no scale": lambda answer: answer._replace(say=None),
    "no latents": lambda answer: answer._replace(frames={k: f for k, f in answer.frames.items() if k != "latents"}),
    "bytes": lambda answer: answer._replace(frames={**answer.frames, "latents": b"nothing of the kind"}),
    "too few": lambda answer: answer._replace(
        frames={**answer.frames, "latents": codec().latents_frame(np.ones(20, np.float32), ConvEncoder.draw(Key(8)))}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("forged", FORGED)
def test_a_common_node_whose_latents_cannot_be_used_is_replaced(forged: str) -> None:
    local = changed(FORGED[forged], instance="server")
    assert run(local, 7) == [4] * 6 + [3]
    assert [why[:2] for why in local.refused[7]] == ["2:"]
    assert np.isfinite(local.model).all()


@pytest.mark.slow
@pytest.mark.parametrize("loud", [1, 2])
def test_what_a_guard_looks_at_has_the_scale_that_a_client_names(loud: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the server instance it multiplies what is decoded: of the common node, 2 in round 7, as of others."""
    norms: dict[int, float] = {}
    verified = Now.verified

    def seen(self: Now, kind: Any, given: Any) -> Any:
        good = verified(self, kind, given)
        norms.update({each.node: kind.norm(each.frame, self.layout) for each in good})
        return good

    monkeypatch.setattr(Now, "verified", seen)

    class Loud(LearnedGradients, id="loud-lgc"):
        def client(self, memory, ask: Ask, me: Me) -> tuple:
            after, answer = super().client(memory, ask, me)
            if me.node == loud and me.number == 7 and answer.say is not None:
                answer = answer._replace(say=Scale(1e4 * answer.say.scale))
            return after, answer

    run(TOY.local(Loud(codec(instance="server"), **STAGES)), 7)
    assert norms.pop(loud) > 1000 * max(norms.values())


@pytest.mark.slow
def test_latents_are_a_quarter_and_what_is_not_coded_travels_as_values() -> None:
    """The first tensor and the bias whole, the last one as top-k on the support, two through the autoencoder."""
    local = TOY.local(learned())
    run(local, 6)
    (leader,) = (answer for answer in local.answers if "support" in answer.frames)
    encoder = half_of(ConvEncoder, local.state["halves"]["encoder"])
    lgc = codec(encoder=encoder.id, scale=leader.say.scale)
    on = lgc.latents_on(open_support(leader.frames["support"], lgc, TOY.layout), 6, TOY.layout, encoder, None)
    tensors = on.open(leader.frames["values"], TOY.layout).tensors
    assert [t.values.k for t in tensors] == [latents(60 + 45), 30, 412]


@pytest.mark.long
def test_torch_comes_with_the_first_step_of_training_only() -> None:
    text = (
        "import sys; sys.path += ['tests', 'tests/systems']; from test_lgc_program import *\n"
        "local = TOY.local(learned()); run(local, 2); print('torch' in sys.modules)\n"
        "run(local, 1, since=3); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match="LGC"):
        LearnedGradients(ScaleCom())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ids of the autoencoder"):
        LearnedGradients(codec(encoder=5))
    for wrong in ({"optimizer": "rmsprop"}, {"lr": 0.0}, {"passes": 0}, {"similarity": -1.0}, {"decoders": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            learned(training=wrong)
    with pytest.raises(ConfigError, match="common"):
        learned(common="last")
