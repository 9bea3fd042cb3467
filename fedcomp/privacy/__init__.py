"""Differential privacy: what is bounded, what is added, what it costs, and what may be said about it.

Importing this package brings neither torch nor Opacus nor scipy.
"""
