"""Graph learning over parts of a graph: P, samplers and plans, layers, and the bytes of rows and ids.

This package brings neither torch nor scipy: the torch layers stand in :mod:`fedcomp.graphs.layers`.
"""
