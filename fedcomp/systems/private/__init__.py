"""Systems that keep a promise of privacy."""
