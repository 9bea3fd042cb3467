"""Studies: the mathematics and the measurements of one page of the catalogue each."""
