"""What is mathematics or a measurement of one paper, and no table of rows: a function for a page of the catalogue."""
