"""ScaleCom as a program: what it does where leaders are lost or lie, and how long its messages are."""

from __future__ import annotations

import numpy as np
import pytest
from beside_product import LAYOUT, TOY, everybody, no_fault, program

from fedcomp import wire
from fedcomp.codecs import ErrorFeedback, ScaleCom, TopK
from fedcomp.codecs.scalecom import open_support, support_frame
from fedcomp.errors import ConfigError
from fedcomp.layout import Layout, TensorSpec
from fedcomp.local import Local
from fedcomp.systems.pair import Pair
from fedcomp.systems.shared_support import SharedSupport


@pytest.mark.parametrize("lost", ["silent", "lost", "crash"])
def test_where_the_leader_is_lost_the_next_one_that_trained_leads(lost: str) -> None:
    fault = lambda number, node, exchange: lost if (number, node) == (2, 1) else ""  # noqa: E731
    local = TOY.local(SharedSupport(ScaleCom(0.05)), fault=fault)
    local.step(1), local.step(2)
    # Round 2 is the turn of node 1; of those that are left, 0, 2 and 3, of the second.
    assert local.told["leader"] == 2
    assert sorted(a.node for a in local.answers if "values" in a.frames) == [0, 2, 3]


@pytest.mark.parametrize("trouble", ["no support", "no values", "another model's support"])
def test_a_leader_that_lies_is_left_out_and_another_one_leads(trouble: str) -> None:
    class Liar(SharedSupport):
        def client(self, memory, ask, me):
            after, answer = super().client(memory, ask, me)
            if me.node == 0 and "support" in answer.frames:
                frames = dict(answer.frames)
                if trouble == "another model's support":
                    frames["support"] = frames["values"]
                else:
                    del frames[trouble.removeprefix("no ")]
                answer = answer._replace(frames=frames)
            return after, answer

    local = TOY.local(Liar(ScaleCom(0.05)))
    local.step(1)
    assert local.told["leader"] == 1
    assert [line.partition(":")[0] for line in local.refused[1]] == ["0"]
    # What it sent is on no support that anybody else holds: it is not asked again, and not acknowledged.
    assert [node for node in range(4) if local.acknowledged(node)] == [1, 2, 3]
    assert local.model.any()


def test_four_more_are_asked_to_lead_and_then_the_round_is_given_up() -> None:
    asked = []

    class Counted(SharedSupport):
        def client(self, memory, ask, me):
            if ask.kind == "query":
                asked.append(me.node)
            return super().client(memory, ask, me)

    lost = lambda number, node, exchange: "lost" if exchange > 1 or node == 0 else ""  # noqa: E731
    local = TOY.local(Counted(ScaleCom(0.05)), 8, fault=lost)
    local.step(1)
    assert asked == [1, 2, 3, 4]
    assert not local.model.any()
    assert "leader" not in local.state


def test_the_mean_and_the_support_are_as_long_for_one_client_as_for_many() -> None:
    system = SharedSupport(ScaleCom(0.05))
    drivers = [TOY.local(system, nodes) for nodes in (1, 8)]
    steps = [[local.step(number) for number in (1, 2)][-1] for local in drivers]
    one, many = ((len(step.frame), len(step.blobs["support"])) for step in steps)
    assert one[0] == many[0]
    assert abs(one[1] - many[1]) < 20  # indices of another choice
    for step in steps:
        supports = open_support(step.blobs["support"], system.codec, LAYOUT)
        assert sum(s.size for s in supports) == 60
        assert np.array_equal(system.reads(step.blobs, 2, LAYOUT).supports[0], supports[0])


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_one_client_is_plain_top_k(beta: float, scope: str) -> None:
    """Spec 7.1.7: for N = 1 CLT-k equals top-k with the same memory, bit for bit."""
    how = {"fault": no_fault, "present": everybody(1, 6)}
    shared, _ = program(SharedSupport(ScaleCom(0.02, beta=beta, scope=scope)), 1, 6, **how)
    alone, _ = program(Pair(ErrorFeedback(TopK(0.02, scope=scope), beta=beta)), 1, 6, **how)
    assert [seen.model for seen in shared] == [seen.model for seen in alone]


def dense_round(system: SharedSupport) -> Local:
    """Return a driver after a dense round of three nodes with 2,000 values, of which the first trains but the last."""

    def train(number: int, node: int, start: np.ndarray) -> np.ndarray:
        made = np.full(2000, node + 1.0, np.float32)
        made[: 1500 if node == 0 else 0] = 0.0
        return start + made

    local = Local(system, Layout.flat(2000), np.zeros(2000, np.float32), train, lambda node: 1.0, 3)
    assert local.step(1) is not None
    return local


def test_a_dense_round_sends_what_is_zero_at_the_leader() -> None:
    """Rows of an embedding that the leader's data does not touch are trained by the others all the same."""
    local = dense_round(SharedSupport(ScaleCom(0.02), 1))
    np.testing.assert_allclose(local.model, np.repeat(np.float32([5 / 3, 2.0]), [1500, 500]), rtol=1e-6)


def test_a_leader_does_not_shorten_a_dense_round() -> None:
    """There is nothing to choose: a leader that sends a shorter support is not followed."""

    class Short(SharedSupport):
        def client(self, memory, ask, me):
            after, answer = super().client(memory, ask, me)
            if me.node == 0 and "support" in answer.frames:
                short = support_frame((np.arange(3),), ScaleCom(1.0), me.layout)
                values = wire.encode([wire.shared((2000,), 1 << 20, np.ones(3, np.float32))])
                answer = answer._replace(frames={"support": short, "values": values})
            return after, answer

    local = dense_round(Short(ScaleCom(0.02), 1))
    assert local.told["leader"] == 1
    np.testing.assert_allclose(local.model, 2.5)


def test_what_may_be_a_variance_stays_positive_in_model_and_frame() -> None:
    layout = Layout((TensorSpec("running_var", (64,), "float32", 0, 64),), (), ("running_var",))
    start = np.full(64, 0.5, np.float32)

    def train(number: int, node: int, model: np.ndarray) -> np.ndarray:
        return model + np.where(np.arange(64) < 2, -1.0, 0.25).astype(np.float32)

    local = Local(SharedSupport(ScaleCom(0.5)), layout, start, train, lambda node: 1.0, 2)
    step = local.step(1)
    assert step is not None
    assert (local.model > 0).all()
    assert local.model[0] == 0.5
    assert local.model[2:].max() == 0.75


def test_other_codecs_are_refused_and_named() -> None:
    with pytest.raises(ConfigError, match="needs ScaleCom as its codec, got TopK"):
        SharedSupport(TopK(0.1))
