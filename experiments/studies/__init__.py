"""Studies: mathematics and measurements of one paper that go beyond a table of rows, as functions for the catalogue."""
