"""The only package of fedcomp that knows Flower: messages, bytes on the wire, engines, rounds.

Importing this package imports nothing else, so that :func:`fedcomp.flower.offline.go_offline` can run before Flower
is first imported (its telemetry switch is read at import).
"""
