"""The experiment on coded sums: what is compared is what was sent, and the oracle notices a wrong sum."""

from __future__ import annotations

import numpy as np
import pytest

from fedcomp.experiments import engines
from fedcomp.experiments.catalog import sumcode
from fedcomp.experiments.findings import Findings, Say
from fedcomp.experiments.options import Config
from fedcomp.experiments.spec import RunResult
from fedcomp.experiments.tables import specs_of

SMALL = ("task.hidden=32", "max_steps=1", "exact_rounds=2")
FEW = (5, 10)


@pytest.fixture(scope="module")
def run() -> tuple[Config, dict[str, RunResult], Findings]:
    """The rows of five and ten clients for two rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sumcode, "FEDERATIONS", FEW)
        patch.setattr(sumcode, "MASKED", FEW)
        patch.setattr(sumcode, "CHECKED", {"share": 5, "mask": 5})
        config = sumcode.EXPERIMENT.configure(rounds=2, assignments=SMALL)
        results = {spec.label: engines.run(spec) for spec in specs_of(sumcode.EXPERIMENT, config)}
        return config, results, sumcode.measure(config, results, Say())


@pytest.mark.long
def test_what_the_server_receives_is_flat_for_the_code_and_linear_without(run) -> None:
    _, results, _ = run
    five, ten = (sumcode.federation(n, results) for n in FEW)
    d = sum(array.size for array in results[sumcode.summed(5)].arrays.values())
    assert ten.coded / five.coded < 1.1
    assert ten.plain / five.plain == pytest.approx(2.0, rel=0.01)
    assert ten.masked / five.masked > 1.6
    # K + T = 4/3 K sums of two bytes a symbol, and 52 bytes of header and length for each; of every client the tag of
    # what it shared, and what it holds.
    for n, found in zip(FEW, (five, ten), strict=True):
        needed = 4 * n // 5
        assert found.coded == pytest.approx(2 * d * 4 / 3 + 52 * needed + 33 * n, rel=0.01)
        assert found.masked == pytest.approx(found.coded + n * (2 * d + 48), rel=0.01)
        assert found.missing == 0
    assert sumcode.per_round(results[sumcode.HUB], "uplink_payload_bytes") > 5 * ten.coded
    result = results[sumcode.summed(10)]
    assert ten.between == result.rounds[2].peer_wire_bytes / 10
    assert result.uplink_payload_bytes == result.ledger.total("payload", direction="up", link="hub")


@pytest.mark.long
def test_all_rows_learn_the_same(run) -> None:
    _, results, _ = run
    for n in FEW:
        losses = [results[label(n)].final.loss for label in (sumcode.plain, sumcode.summed, sumcode.masked)]
        assert max(losses) - min(losses) < 0.01
        assert max(losses) < results[sumcode.plain(n)].rounds[0].loss


@pytest.mark.long
def test_claims_hold_but_for_those_about_fifty_clients(run) -> None:
    found = {claim.name: claim for claim in run[2].claims}
    failed = {name for name, claim in found.items() if not claim.ok}
    # With ten clients and 2500 coordinates framing is most of the wire, and ten masks are no five times five.
    assert all("on the wire" in name or "LightSecAgg" in name or "one client sends" in name for name in failed)
    assert sum("bit for bit" in name for name in found) == 2


@pytest.mark.long
def test_the_oracle_notices_a_wrong_model(run) -> None:
    """One bit of one coordinate of one round."""
    config, _, _ = run
    kept: list[sumcode.Witness] = []

    class Keeping(sumcode.Witness):
        def __init__(self) -> None:
            super().__init__()
            kept.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sumcode, "Witness", Keeping)
        assert sumcode.exact_rounds("share", 5, config=config) == {"share": 1.0}
    (witness,) = kept
    spec = next(s for s in sumcode.rows(config) if s.label == sumcode.summed(5))
    assert witness.exact(spec, 2) == 2
    name = next(iter(witness.models[3]))
    changed = witness.models[3][name].copy()
    flat = changed.reshape(-1)
    flat[7] = np.nextafter(flat[7], np.float32(9))
    witness.models[3] = {**witness.models[3], name: changed}
    assert witness.exact(spec, 2) == 1
    # A client that was forgotten: its memory is another one from then on.
    del witness.trained[1][0]
    assert witness.exact(spec, 2) == 0


def test_rows_say_how_many_may_be_lost() -> None:
    for n in sumcode.FEDERATIONS:
        shape = sumcode.code(n)
        assert n - shape["symbols"] - shape["threshold"] == n // 5
