"""The table of accountants: what is compared is the same event, and what is said of it follows from the figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedcomp.experiments.audits import accountants
from fedcomp.experiments.audits.accountants import CASES, COLUMNS, RESPONSE, Case, installed, main
from fedcomp.privacy.gaussian import gaussian_epsilon


def costs(case: Case) -> dict[str, float]:
    return {name: found for name, found in zip(COLUMNS, case.costs(), strict=True) if found is not None}


@pytest.mark.long
def test_the_table_of_accountants_says_why_ours_stay() -> None:
    exact, integers, sampled, skellam = (costs(CASES[i]) for i in (0, 1, 2, 4))
    # Ten releases of z = 4 are one of z = 4 / sqrt(10).
    assert exact["ours"] == pytest.approx(gaussian_epsilon(10**0.5 / 4.0, accountants.DELTA), abs=1e-9)
    assert exact["ours"] < exact["Opacus PRV"] < exact["Opacus RDP"]
    assert sampled["ours"] == pytest.approx(sampled["Opacus PRV"], abs=1e-6)
    assert sampled["ours"] < sampled["Opacus RDP"]
    assert set(integers) == set(skellam) == {"ours"}
    for case in (CASES[i] for i in (0, 1, 2, 4)):
        assert "stays" in case.verdict(case.costs())
        assert "TO BE REPLACED" not in case.verdict(case.costs())


def test_who_is_tighter_is_named_and_needs_a_reason() -> None:
    assert CASES[0].verdict((3.0, 3.5, 3.001, None, 2.9)) == "dp-accounting PLD is 0.100 tighter; stays: TO BE REPLACED"
    assert "one package less" in CASES[2].verdict((3.0, 3.5, 3.0, None, 2.9))
    assert "none is tighter (Opacus PRV +0.0010)" in CASES[0].verdict((3.0, 3.5, 3.001, None, None))
    assert RESPONSE.verdict((None,) * 5) == "nothing here draws such noise"


def test_without_dp_accounting_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accountants, "installed", lambda: False)
    assert main(CASES[:1]) == 0
    printed = capsys.readouterr().out
    assert "dp-accounting is not installed" in printed
    assert "| Gaussian, z = 4 | 10 | 3.3414 |" in printed


@pytest.mark.skipif(not installed(), reason="dp-accounting is not installed")
def test_dp_accounting_heeds_no_number_of_randomised_responses() -> None:
    gaussian = costs(CASES[0])
    assert gaussian["dp-accounting PLD"] == pytest.approx(gaussian["ours"], abs=accountants.TOLERANCE)
    by_number, one_by_one = (replace(RESPONSE, singly=way).by_google()[1] for way in (False, True))
    assert one_by_one == pytest.approx(10 * by_number, rel=1e-3)
