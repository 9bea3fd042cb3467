"""Parallel composition: parties with disjoint records cost what the dearest of them costs."""

from __future__ import annotations

import pytest

from fedcomp.errors import ConfigError
from fedcomp.privacy.accounting import compose
from fedcomp.privacy.events import Event
from fedcomp.privacy.parallel import ParallelLedger
from fedcomp.privacy.sampling import Sampling

DELTA = 1e-6
CHEAP = Event("discrete_gaussian", 4.0, 4000.0)
DEAR = Event("discrete_gaussian", 2.0, 2000.0)


def ledger(**changes):
    settings = {"delta": DELTA, "population": 1000, "adjacency": "zero_out", "sampling": Sampling(), "unit": "record"}
    return ParallelLedger(**{**settings, **changes})


def test_the_cost_is_the_largest_over_parties_and_not_the_sum():
    books = ledger()
    assert books.epsilon() == 0.0
    books.record(CHEAP, round=1, times=5, participants=[0])
    books.record(DEAR, round=6, times=2, participants=[1])
    books.record(DEAR, round=8, participants=[2])
    alone = {0: compose([CHEAP] * 5, DELTA), 1: compose([DEAR] * 2, DELTA), 2: compose([DEAR], DELTA)}
    assert books.epsilon() == max(cost.epsilon for cost in alone.values()) == alone[1].epsilon
    assert (books.releases, books.rounds) == (5, 5)
    books.record(CHEAP, round=9, times=4, participants=[0])
    assert books.epsilon() == compose([CHEAP] * 9, DELTA).epsilon > alone[1].epsilon


def test_what_integers_cost_beyond_is_that_of_one_party_and_not_of_all():
    books, alone = ledger(), ledger()
    alone.record(DEAR, round=1, participants=[0])
    for party in range(9):
        books.record(DEAR, round=party, participants=[party])
    assert books.lattice == alone.lattice > 0.0
    assert ledger().lattice == 0.0


def test_an_event_at_nobody_is_refused():
    books = ledger()
    with pytest.raises(ConfigError, match="those on whose records"):
        books.record(DEAR, round=1)
    assert books.epsilon() == 0.0
    assert books.entries == ()


def test_an_event_on_records_of_several_parties_counts_for_each():
    books = ledger()
    books.record(DEAR, round=1, participants=[0, 1])
    books.record(DEAR, round=2, participants=[1])
    assert books.epsilon() == compose([DEAR] * 2, DELTA).epsilon


def test_what_happened_is_written_down_and_what_may_happen_is_asked_for_each_party():
    budget = compose([DEAR] * 2, DELTA).epsilon
    books = ledger(budget=budget)
    books.record(DEAR, round=1, times=2, participants=[0])
    assert not books.allows(0, DEAR, 1)
    assert books.allows(1, DEAR, 2)
    assert not books.allows(1, DEAR, 3)
    # Told of after the fact: refusing it would only leave it out of the books.
    books.record(DEAR, round=3, participants=[0])
    assert books.epsilon() > budget


@pytest.mark.slow
def test_sampling_is_left_out_of_the_second_figure():
    sampled = Event("discrete_gaussian", 1.0, 1000.0, rate=0.1)
    books = ledger(sampling=Sampling("poisson", rate=0.1))
    books.record(sampled, round=1, times=20, participants=[3])
    assert books.epsilon() == pytest.approx(compose([sampled] * 20, DELTA).epsilon)
    plain = Event("discrete_gaussian", 1.0, 1000.0)
    assert books.epsilon(amplified=False) == pytest.approx(compose([plain] * 20, DELTA).epsilon)
    assert books.epsilon(amplified=False) > 3 * books.epsilon()


def test_the_books_are_those_of_the_file_and_of_the_checkpoint(tmp_path):
    first = ledger()
    first.open(tmp_path / "books")
    first.record(DEAR, round=1, times=3, participants=[0])
    state = first.state_dict()
    first.record(CHEAP, round=4, participants=[1])
    first.close()
    second = ledger()
    second.load_state_dict(state)
    assert second.participations == {0: 3}
    second.open(tmp_path / "books")
    assert second.participations == {0: 3, 1: 1}
    assert second.epsilon() == first.epsilon()
    second.close()
