"""Graph learning on partitioned graphs: the normalised adjacency P, samplers, plans, layers, and bytes of rows and ids.

This package brings neither torch nor scipy: the torch layers stand in :mod:`fedcomp.graphs.layers`.
"""
