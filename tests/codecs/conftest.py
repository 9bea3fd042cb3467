"""Fixtures that iterate over the example codecs and layouts."""

from __future__ import annotations

import pytest
from codec_examples import EXAMPLES, LAYOUTS

from fedcomp.codecs import Codec
from fedcomp.layout import Layout


def _id(codec: Codec) -> str:
    return repr(codec).replace("ErrorFeedback", "EF")


@pytest.fixture(params=EXAMPLES, ids=_id)
def codec(request: pytest.FixtureRequest) -> Codec:
    """Every example codec in turn."""
    return request.param


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Layout:
    """Every example layout in turn."""
    return LAYOUTS[request.param]
