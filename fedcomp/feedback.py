"""Error feedback, under the name users look for: the codec itself stands with the others in :mod:`fedcomp.codecs`."""

from fedcomp.codecs.feedback import ErrorFeedback

__all__ = ["ErrorFeedback"]
