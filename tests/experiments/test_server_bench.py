"""What a client costs the server: the benchmark at its smallest size."""

from __future__ import annotations

import pytest

from fedcomp.experiments.bench import server


@pytest.mark.long
def test_every_codec_is_measured_also_where_replies_are_no_copies_of_each_other() -> None:
    """With more clients than distinct updates: a codec that draws for each sender needs a frame from each."""
    found = server.run(quick=True)
    rows = {(row["codec"], row["clients"]): row for row in found["rows"]}
    assert {codec for codec, _ in rows} == {server.PLAIN, *server.CODECS}
    assert {clients for _, clients in rows} == {2, 12}
    for (codec, _), row in rows.items():
        assert row["ms per client and million values"] > 0
        # All but plain models take fewer bytes, or a header more.
        assert row["bytes of a reply"] <= 80_000 + 44 * (codec != server.PLAIN)
    # At this size a run says that the benchmark works, and nothing about its claims.
    assert not any(claim.gate for claim in found["claims"])
    assert len(found["claims"]) >= 3 * len(server.CODECS)
