"""What the terminal shows of benchmark rows."""

from __future__ import annotations

from fedcomp.experiments.console import row_groups


def test_rows_are_grouped_by_their_columns_in_order() -> None:
    rows = [{"a": 1, "b": 2}, {"c": 1}, {"a": 3, "b": 4}, {"c": 2}]
    assert row_groups(rows) == [[rows[0], rows[2]], [rows[1], rows[3]]]
    assert row_groups([]) == []
