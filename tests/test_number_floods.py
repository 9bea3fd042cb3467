"""No number that a server or a node names makes the other one hold, or do, more than a model allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest
from message_examples import EXAMPLES

from fedcomp.codecs import Factors, RandomProjection
from fedcomp.codecs.projection import MOST_SIGNS
from fedcomp.coding.relay import RelayPlan
from fedcomp.coding.sumcode import SumPlan
from fedcomp.errors import ConfigError
from fedcomp.layout import NONE_DENSE, Layout, Update
from fedcomp.rng import Key
from fedcomp.rules import Int, Many

HERE = Path(__file__).parent

FREE = {
    # Compared, counted or looked up; nothing is as long as they are.
    "sequence generation version base oldest number consumed before trained": "compared with the receiver's own",
    "seed": "names a random stream",
    "partition_id": "names a party",
    "unchanged copies": "numbers of tensors; a list is as long as the message that brings it",
    "sent handed parcels": "a figure, reported or compared with what came",
}
"""What the large numbers of messages cost, by their names."""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["codecs", "gossip", "plans"])
def test_hostile_numbers_are_refused_or_cost_no_more_than_the_model_allows(kind: str) -> None:
    """Every number of every codec, gossip algorithm and plan, with half a gigabyte to spare; see number_floods.py."""
    path = os.pathsep.join(str(HERE / name) for name in (".", "codecs", "gossip"))
    done = subprocess.run(
        [sys.executable, str(HERE / "number_floods.py"), kind],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    *faults, last = done.stdout.splitlines() or [done.stderr[-2000:]]
    assert done.returncode == 0, done.stderr[-2000:]
    assert faults == []
    assert int(last.removesuffix(" cases")) >= 80


def test_every_large_number_of_a_message_has_a_reason_why_it_costs_nothing() -> None:
    """A new field has a bound of a million at most, or says here why it needs none."""
    known = {name for names in FREE for name in names.split()}
    large: dict[str, str] = {}
    for schema in {type(example) for example in EXAMPLES.values()}:
        for name, hint in get_type_hints(schema, include_extras=True).items():
            for rule in getattr(hint, "__metadata__", ()):
                each = rule.each if isinstance(rule, Many) else rule
                if isinstance(each, Int) and each.most > 1 << 20:
                    large[name] = schema.__name__
    assert sorted(large.keys() - known) == []
    assert sorted(known - large.keys()) == [], "a reason for a field that is no more"


def update(layout: Layout) -> Update:
    return Update(np.random.default_rng(0).normal(size=layout.size).astype(np.float32), layout)


def test_directions_and_iterations_that_take_too_long_are_refused_before_the_first() -> None:
    wide = Layout.of({"a": np.zeros((1300, 1700), np.float32)}, NONE_DENSE)
    projection = RandomProjection(directions=wide.size - 1)
    assert projection.directions * wide.size > MOST_SIGNS
    with pytest.raises(ConfigError, match="lower directions"):
        projection.encode(update(wide), {}, Key(0))
    with pytest.raises(ConfigError, match="lower directions"):
        next(projection.tangents(wide, Key(0)))
    # As coordinates, one at a time: all at once are the square of the model.
    assert next(RandomProjection(directions=700_000).tangents(Layout.flat(600_000), Key(0))).sum() == 1.0
    flat = Layout.of({"a": np.zeros((200, 150), np.float32)}, NONE_DENSE)
    for codec in (Factors(mode="rank", iterations=2**40), Factors(mode="rank", rank=2**40, iterations=10**6)):
        with pytest.raises(ConfigError, match=r"more than \d+ products"):
            codec.encode(update(flat), codec.init(flat), Key(0))


def test_a_plan_of_a_sum_is_bounded_in_what_it_costs() -> None:
    plan = {"p": 2**31 - 1, "size": 10, "bound": 1, "contributors": 3, "relays": 3, "symbols": 2, "private": 1}
    plan |= {"max_weight": 1, "seed": 0, "checks": 1, "least": 2, "mode": "share", "extras": []}
    assert SumPlan.from_config(plan).relays == 3
    hostile = ({"contributors": 2**29}, {"relays": 2**30}, {"checks": 2**40}, {"extras": [0] * 17}, {"size": 2**31})
    for change in (*hostile, {"size": 2**29, "relays": 1000}):
        with pytest.raises(ConfigError, match=r"at most|more than"):
            SumPlan.from_config(plan | change)


def test_shards_of_a_payload_are_bounded_together() -> None:
    with pytest.raises(ConfigError, match=r"Have more symbols \(K\), or fewer shards"):
        RelayPlan("rlnc", 1, 1024, 1).packets(0, bytes(1 << 23))
