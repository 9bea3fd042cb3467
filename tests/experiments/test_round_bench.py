"""What a round costs beside the app: the benchmark at its smallest size."""

from __future__ import annotations

import pytest

from fedcomp.experiments.bench import round as bench


@pytest.mark.slow
def test_both_halves_of_every_system_are_measured() -> None:
    found = bench.run(quick=True)
    rows = {(row["system"], row["replies"]): row for row in found["rows"]}
    assert set(rows) == {(system, count) for system in bench.SYSTEMS for count in (bench.FEW, bench.MANY)}
    whole = rows[bench.PLAIN, bench.FEW]["kB up"]
    for (system, _), row in rows.items():
        assert row["server, read passes"] > 0
        assert row["server, models"] > 0
        if system != bench.PLAIN:
            assert row["client, read passes"] > 0
            assert row["kB up"] < whole / 4
        assert (row["kB down"] < whole / 4) == (system == bench.DOWN)
    assert not any(claim.gate for claim in found["claims"])
