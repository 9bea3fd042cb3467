"""Every mutant is caught by the tier that is there for it, and its original is not."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from toy import with_halves

from fedcomp.clients.private.mod import private
from fedcomp.experiments.audits.caught import MUTANTS, Mutant
from fedcomp.flower.grid import InProcessGrid
from fedcomp.flower.privacy import PRIVATE

pytestmark = pytest.mark.audit


def caught(name: str) -> None:
    """The audit passes the original and flags the mutant."""
    mutant: Mutant = MUTANTS[name]
    right = mutant.original()
    assert right
    assert all(verdict.ok for verdict in right), [v for v in right if not v.ok]
    wrong = mutant.mutated()
    assert [v for v in wrong if not v.ok], wrong


@pytest.mark.long
def test_mutant_no_clip_is_caught() -> None:
    caught("no clip")


@pytest.mark.long
def test_mutant_clip_per_tensor_is_caught() -> None:
    caught("clip per tensor")


def test_mutant_clip_before_adding_the_residual_is_caught() -> None:
    caught("clip before memory")


@pytest.mark.long
def test_mutant_noise_on_the_mean_with_wrong_n_is_caught() -> None:
    caught("noise on the mean")


@pytest.mark.long
def test_mutant_noise_per_client_and_divided_is_caught() -> None:
    caught("noise per client")


@pytest.mark.long
def test_mutant_noise_cast_to_integer_buffers_is_caught() -> None:
    caught("noise in integers")


@pytest.mark.long
def test_mutant_weights_by_num_examples_is_caught() -> None:
    caught("weights")


@pytest.mark.long
def test_mutant_c_instead_of_2c_for_replace_is_caught() -> None:
    caught("C for 2C")


@pytest.mark.long
def test_mutant_forgot_sqrt_k_is_caught() -> None:
    caught("no root of k")


@pytest.mark.long
def test_mutant_one_event_per_batch_is_caught() -> None:
    caught("event per batch")


@pytest.mark.long
def test_mutant_accountant_reset_each_round_is_caught() -> None:
    caught("accountant reset")


@pytest.mark.long
def test_mutant_support_of_private_top_k_left_un_noised_is_caught() -> None:
    caught("private support")


def test_mutant_same_seed_each_round_is_caught() -> None:
    caught("same seed")


@pytest.mark.long
def test_mutant_metric_leak_is_caught() -> None:
    caught("metric leak")


@pytest.mark.long
def test_mutant_flowers_adaptive_clipping_sign_is_caught() -> None:
    caught("Flower's sign")


@pytest.mark.long
def test_mutant_uncentred_norm_bits_is_caught() -> None:
    caught("uncentred bits")


@pytest.mark.long
def test_2_6_mutant_top_k_support_of_the_private_sum_with_noise_on_the_support_is_caught() -> None:
    caught("private support, low rank")


@pytest.mark.long
def test_mutant_separate_clipping_of_both_low_rank_products_is_caught() -> None:
    caught("separate clips")


def test_mutant_duplicate_record_in_two_teachers_is_caught() -> None:
    caught("record twice")


def test_every_mutant_has_a_test_of_its_own(request: pytest.FixtureRequest) -> None:
    source = request.path.read_text()
    missing = [name for name in MUTANTS if f'caught("{name}")' not in source]
    assert not missing


def replies(mods: list, loss: float, examples: int, counter: int) -> tuple[dict, dict]:
    """Return metrics and arrays of one client's reply to a private training message."""
    app = with_halves(mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = message.content.array_records["arrays"]
        after = {"w": Array(model["w"].numpy() + np.float32(1.0)), "n": Array(model["n"].numpy() + counter)}
        metrics = MetricRecord({"loss": loss, "num-examples": examples})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    model = ArrayRecord({"w": Array(np.zeros(3, np.float32)), "n": Array(np.zeros(2, np.int64))})
    config = ConfigRecord({PRIVATE: True, "server-round": 1})
    with InProcessGrid(app, 1) as grid:
        message = Message(RecordDict({"arrays": model, "config": config}), grid.get_node_ids()[0], "train")
        (reply,) = grid.send_and_receive([message])
    arrays = {k: v.numpy().tolist() for k, v in reply.content.array_records["arrays"].items()}
    return {name: dict(record) for name, record in reply.content.metric_records.items()}, arrays


def test_mutant_exact_loss_in_the_reply_is_caught() -> None:
    """Two clients with the same update: whatever else is in a reply tells them apart without any noise."""
    worlds = ((0.25, 10, 3), (7.5, 1000, 4))
    one, other = (replies([private()], *world) for world in worlds)
    assert one == other == ({}, {"w": [1.0, 1.0, 1.0], "n": [0, 0]})
    one, other = (replies([], *world) for world in worlds)
    assert one[0]["metrics"]["loss"] == 0.25
    assert one != other
