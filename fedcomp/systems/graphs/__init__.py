"""Graph convolutions on a graph of several owners with sampled neighbours: both halves."""
