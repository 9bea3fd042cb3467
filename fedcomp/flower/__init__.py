"""The Flower layer: messages, bytes on the wire, engines and rounds; the lower layers do not import Flower.

Importing this package imports nothing else, so that :func:`fedcomp.flower.offline.go_offline` can run before Flower
is first imported (its telemetry switch is read at import).
"""
