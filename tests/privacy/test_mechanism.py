"""One object owns bound, sensitivity, noise and cost, so none of them can drift from the others."""

from __future__ import annotations

import math

import numpy as np
import pytest
from every_vote import every_vote

from fedcomp.errors import ConfigError
from fedcomp.privacy import mechanism as mechanism_module
from fedcomp.privacy.entropy import Entropy, SeededEntropy
from fedcomp.privacy.errors import BudgetExceeded, PrivacyLedgerError, Unbounded
from fedcomp.privacy.events import Event
from fedcomp.privacy.mechanism import GridGaussian, Mechanism, PrivateSum, Votes
from fedcomp.rng import Key


def stream(name: str, round: int = 0) -> SeededEntropy:
    return SeededEntropy(Key(9, f"test/mechanism/{name}", round=round), insecure_deterministic=True)


class Book:
    """A ledger that only writes down; with ``error``, one that refuses."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.lines: list[tuple[Event, int, list[int]]] = []

    def record(self, event: Event, *, round: int, participants=()) -> None:
        if self.error is not None:
            raise self.error
        self.lines.append((event, round, list(participants)))


class Untouched(Entropy):
    """Fails when it is asked for a byte."""

    secure = True
    description = "none"

    def bytes(self, count: int) -> bytes:
        raise AssertionError("noise was drawn")


def distances(admitted: list[np.ndarray], adjacency: str) -> float:
    """Return how far one unit moves the sum: from nothing to its contribution, or from one to another."""
    if adjacency == "replace":
        return max(float(np.linalg.norm(a - b)) for a in admitted for b in admitted)
    return max(float(np.linalg.norm(a)) for a in admitted)


@pytest.mark.slow
@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove", "replace"])
@pytest.mark.parametrize(("d", "k"), [(4, 1), (4, 2), (5, 2), (3, 3)])
def test_audit_A_sensitivity_of_votes_is_exact(adjacency: str, d: int, k: int) -> None:
    votes = Votes(noise_multiplier=1.0, adjacency=adjacency, k=k, shape=(d,))
    admitted = [votes.admit(v) for v in every_vote(d, k)]
    assert distances(admitted, adjacency) == pytest.approx(votes.sensitivity, rel=1e-12)
    expected = math.sqrt(k) * (2 if adjacency == "replace" else 1)
    assert votes.sensitivity * votes.step == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("adjacency", ["zero_out", "add_remove", "replace"])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_audit_A_sensitivity_of_clipped_sums_is_tight(adjacency: str, size: int) -> None:
    mechanism = GridGaussian(noise_multiplier=1.0, adjacency=adjacency, clip=0.37, size=size)
    rng = Key(2, layer=size).generator()
    tried = [np.full(size, v) for v in (1e-9, 0.37, 1e9, 1e300, 0.37 / math.sqrt(size))]
    tried += [np.eye(1, size, i % size).ravel() * v for i, v in enumerate((0.3699, 0.37, 0.3701, 1e30))]
    tried += [rng.normal(size=size) * 10.0**e for e in range(-3, 4)]
    tried += [-v for v in tried]
    admitted = [mechanism.admit(v) for v in tried]
    worst = distances(admitted, adjacency)
    assert 0.99 * mechanism.sensitivity <= worst <= mechanism.sensitivity
    assert mechanism.sensitivity * mechanism.step == pytest.approx(0.37 * (2 if adjacency == "replace" else 1))


def test_replacing_costs_twice_the_noise() -> None:
    for make in (
        lambda a: GridGaussian(noise_multiplier=2.0, adjacency=a, clip=1.0, size=10),
        lambda a: Votes(noise_multiplier=2.0, adjacency=a, k=5, shape=(10,)),
    ):
        assert make("replace").sigma == pytest.approx(2 * make("zero_out").sigma)
        assert make("add_remove").sigma == make("zero_out").sigma
        assert make("replace").event().noise_multiplier == make("zero_out").event().noise_multiplier == 2.0


@pytest.mark.parametrize("size", [1, 7, 1000, 10**6, 10**8])
def test_the_grid_is_fine_enough_for_its_size(size: int) -> None:
    mechanism = GridGaussian(noise_multiplier=1.0, clip=3.0, size=size)
    assert mechanism.step <= 3.0 / (50 * math.sqrt(size))
    assert mechanism.bound == 2.0 ** round(math.log2(mechanism.bound))
    # Rounding moves a vector by sqrt(d) / 2 steps at most.
    assert 0.5 * math.sqrt(size) * mechanism.step <= 0.01 * 3.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_is_refused_and_the_sum_unchanged(bad: float) -> None:
    private = PrivateSum(GridGaussian(noise_multiplier=0.0, clip=1.0, size=3), (3,))
    private.add(1, np.array([0.5, 0.0, 0.0]))
    with pytest.raises(Unbounded):
        private.add(2, np.array([0.0, bad, 0.0]))
    assert private.participants == [1]
    assert private.release(Book(), round=1).tolist() == [0.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("votes", "why"),
    [
        (np.array([1, 1, 1, 0]), "3 votes"),
        (np.array([2, 0, 0, 0]), "not -1, 0 or 1"),
        (np.array([-2, 0, 0, 0]), "not -1, 0 or 1"),
        (np.array([1, 0, 0]), "shape"),
        (np.array([[1, 0, 0, 0]]), "shape"),
        (np.array([1.0, 0, 0, 0]), "integers"),
        (np.array([True, False, False, False]), "integers"),
        (np.array([255, 0, 0, 0], np.uint8), "integers"),
        ([1, 0, 0, 0], "integers"),
        (np.array([math.nan, 0, 0, 0]), "integers"),
    ],
)
def test_1_11_h_forged_votes_are_refused(votes, why: str) -> None:
    private = PrivateSum(Votes(noise_multiplier=0.0, k=2, shape=(4,)), (4,))
    with pytest.raises(Unbounded, match=why):
        private.add(0, votes)
    assert private.participants == []


def test_extreme_integers_do_not_wrap_into_votes() -> None:
    votes = Votes(noise_multiplier=1.0, k=2, shape=(2,))
    for value in (-128, 127):
        with pytest.raises(Unbounded):
            votes.admit(np.array([value, 0], np.int8))
    with pytest.raises(Unbounded):
        votes.admit(np.array([-(2**63), 0]))


def test_rows_are_bounded_one_by_one_and_each_is_a_release() -> None:
    votes = Votes(noise_multiplier=3.0, k=1, shape=(4, 2), by_row=True)
    assert votes.event().releases == 4
    assert votes.admit(np.array([[1, 0], [0, 1], [0, 0], [-1, 0]])).shape == (4, 2)
    with pytest.raises(Unbounded, match="2 votes"):
        votes.admit(np.array([[1, 0], [0, 1], [0, 0], [-1, 1]]))
    # Not by rows, four votes need a k of four.
    with pytest.raises(Unbounded):
        Votes(noise_multiplier=3.0, k=1, shape=(4, 2)).admit(np.array([[1, 0], [0, 1], [0, 0], [-1, 0]]))
    with pytest.raises(ConfigError, match="rows"):
        Votes(noise_multiplier=3.0, k=1, shape=(4,), by_row=True)


@pytest.mark.parametrize("z", [0.01, 0.5, 3.0, 100.0])
@pytest.mark.parametrize("adjacency", ["zero_out", "replace"])
def test_votes_are_refined_where_their_noise_would_be_coarse(z: float, adjacency: str) -> None:
    votes = Votes(noise_multiplier=z, adjacency=adjacency, k=4, shape=(9,))
    assert votes.grid_sigma >= 10.0 * (1 - 1e-12)
    assert votes.sigma == pytest.approx(z * 2.0 * (2 if adjacency == "replace" else 1))
    assert votes.admit(np.ones(9, np.int8) * (np.arange(9) < 4))[0] * votes.step == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["discrete_gaussian", "skellam", "gaussian"])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace"])
def test_audit_B_noise_on_a_release_is_what_the_event_says(noise: str, adjacency: str) -> None:
    mechanism = GridGaussian(noise_multiplier=1.5, adjacency=adjacency, noise=noise, clip=0.8, size=100_000)
    private, book = PrivateSum(mechanism, (100_000,)), Book()
    vector = Key(5).generator().normal(size=100_000)
    private.add(4, vector)
    released = private.release(book, round=3, entropy=stream(f"{noise}/{adjacency}"))
    residual = (released - mechanism.admit(vector) * mechanism.step) / 0.8
    ((event, round_, participants),) = book.lines
    deviation = event.noise_multiplier * (2.0 if adjacency == "replace" else 1.0)
    z = (float(np.sum((residual / deviation) ** 2)) - residual.size) / math.sqrt(2 * residual.size)
    assert abs(z) < 4.9
    assert (round_, participants) == (3, [4])
    assert event.noise == noise
    assert event.grid_sigma == (math.inf if noise == "gaussian" else mechanism.grid_sigma)


def test_every_output_lies_on_the_grid_whatever_the_input() -> None:
    for value in (0.0, 1.0, 0.123456789):
        mechanism = GridGaussian(noise_multiplier=1.0, clip=1.0, size=4)
        for i in range(50):
            private = PrivateSum(mechanism, (4,))
            private.add(0, np.array([value, 0.0, 0.0, 0.0]))
            out = private.release(Book(), round=1, entropy=stream("grid", i)) / mechanism.step
            np.testing.assert_array_equal(out, np.rint(out))


@pytest.mark.parametrize("error", [BudgetExceeded("over"), PrivacyLedgerError("disk full"), OSError("no space")])
def test_nothing_is_drawn_or_released_unless_the_event_was_recorded(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mechanism_module, "draw", lambda *_: pytest.fail("noise was drawn"))
    private = PrivateSum(GridGaussian(noise_multiplier=1.0, clip=1.0, size=3), (3,))
    private.add(0, np.ones(3))
    with pytest.raises(type(error)):
        private.release(Book(error), round=1, entropy=Untouched())
    # Nothing left, so a later release with a ledger that writes is the first.
    monkeypatch.undo()
    book = Book()
    assert private.release(book, round=2, entropy=stream("later")).shape == (3,)
    assert len(book.lines) == 1


def test_one_contribution_of_each_participant() -> None:
    private = PrivateSum(GridGaussian(noise_multiplier=0.0, clip=1.0, size=2), (2,))
    private.add(7, np.array([0.25, 0.0]))
    with pytest.raises(Unbounded, match="participant 7"):
        private.add(7, np.array([0.25, 0.0]))
    private.add(8, np.array([0.25, 0.5]))
    assert private.release(Book(), round=1).tolist() == [0.5, 0.5]


def test_one_release_and_nothing_after_it() -> None:
    private, book = PrivateSum(GridGaussian(noise_multiplier=1.0, clip=1.0, size=2), (2,)), Book()
    private.add(1, np.ones(2))
    private.release(book, round=1, entropy=stream("once"))
    with pytest.raises(Unbounded, match="second release"):
        private.release(book, round=1, entropy=stream("once"))
    with pytest.raises(Unbounded, match="released"):
        private.add(2, np.ones(2))
    assert len(book.lines) == 1


def test_what_is_paid_for_elsewhere_is_recorded_as_told() -> None:
    private, book = PrivateSum(GridGaussian(noise_multiplier=2.0, clip=1.0, size=5), (5,)), Book()
    private.add(1, np.ones(5))
    joint = Event(noise="discrete_gaussian", noise_multiplier=1.0, label="joint")
    private.release(book, round=1, entropy=stream("joint"), event=joint, participants=[1, 2, 3])
    assert book.lines == [(joint, 1, [1, 2, 3])]


def test_no_noise_costs_what_no_noise_costs() -> None:
    mechanism = Votes(noise_multiplier=0.0, k=1, shape=(3,))
    assert mechanism.event().noise_multiplier == 0.0
    private = PrivateSum(mechanism, (3,))
    private.add(0, np.array([0, -1, 0]))
    assert private.release(Book(), round=1, entropy=Untouched()).tolist() == [0.0, -1.0, 0.0]


def test_skellam_is_accounted_with_its_l1_sensitivity() -> None:
    for adjacency, factor in (("zero_out", 1), ("replace", 2)):
        votes = Votes(noise_multiplier=20.0, adjacency=adjacency, noise="skellam", k=9, shape=(50,))
        assert votes.event().grid_l1 == 9 * factor
        grid = GridGaussian(noise_multiplier=1.0, adjacency=adjacency, noise="skellam", clip=1.0, size=50)
        admitted = grid.admit(np.full(50, 1.0))
        assert 0.99 * grid.l1_bound <= np.abs(admitted).sum() <= grid.l1_bound
        assert grid.event().grid_l1 == grid.l1_bound * factor
    assert Votes(noise_multiplier=1.0, k=9, shape=(50,)).event().grid_l1 == 0.0


def test_a_contribution_of_another_shape_never_broadcasts() -> None:
    private = PrivateSum(GridGaussian(noise_multiplier=0.0, clip=1.0, size=1), (3,))
    with pytest.raises(Unbounded, match="shape"):
        private.add(0, np.array([0.5]))


def test_a_mechanism_without_bounds_cannot_be_made() -> None:
    with pytest.raises(TypeError):
        Mechanism(noise_multiplier=1.0)
