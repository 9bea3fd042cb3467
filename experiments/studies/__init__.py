"""Studies: mathematics or measurements of one paper that no table of rows covers, as functions for catalogue pages."""
