"""Differential privacy: bounds, mechanisms, accounting, and statements of the guarantee.

Importing this package brings neither torch nor Opacus nor scipy.
"""
