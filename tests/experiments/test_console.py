"""What the terminal shows of benchmark rows."""

from __future__ import annotations

from fedcomp.experiments.console import rows_tables


def test_rows_are_grouped_by_their_columns_in_order() -> None:
    rows = [{"a": 1, "b": 2}, {"c": 1}, {"a": 3, "b": 4}, {"c": 2}]
    made = [([column.header for column in table.columns], table.row_count) for table in rows_tables(rows)]
    assert made == [(["a", "b"], 2), (["c"], 2)]
    assert rows_tables([]) == []
