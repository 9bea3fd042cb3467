"""A fixture that iterates over the example codecs."""

from __future__ import annotations

import pytest
from codec_examples import EXAMPLES

from fedcomp.codecs import Codec


def _id(codec: Codec) -> str:
    return repr(codec).replace("ErrorFeedback", "EF")


@pytest.fixture(params=EXAMPLES, ids=_id)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every example codec in turn."""
    return request.param
