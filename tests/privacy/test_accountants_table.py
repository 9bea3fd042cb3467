"""The table of accountants: what is compared is the same event, and what is said of it follows from the figures."""

from __future__ import annotations

import sys

import pytest

from fedcomp.experiments.audits import accountants
from fedcomp.experiments.audits.accountants import CASES, COLUMNS, RESPONSE, Row, counted_once, installed, lines, table
from fedcomp.privacy.gaussian import gaussian_epsilon


def costs(row: Row) -> dict[str, float]:
    return {name: found for name, found in zip(COLUMNS, row.epsilons, strict=True) if found is not None}


@pytest.mark.long
def test_the_table_of_accountants_says_why_ours_stay() -> None:
    exact, integers, sampled, skellam = rows = table([CASES[0], CASES[1], CASES[2], CASES[4]])
    # Ten releases of z = 4 are one of z = 4 / sqrt(10).
    assert costs(exact)["ours"] == pytest.approx(gaussian_epsilon(10**0.5 / 4.0, accountants.DELTA), abs=1e-9)
    assert costs(exact)["ours"] < costs(exact)["Opacus PRV"] < costs(exact)["Opacus RDP"]
    assert costs(sampled)["ours"] == pytest.approx(costs(sampled)["Opacus PRV"], abs=1e-6)
    assert costs(sampled)["ours"] < costs(sampled)["Opacus RDP"]
    assert [set(costs(row)) for row in (integers, skellam)] == [{"ours"}, {"ours"}]
    assert all("stays" in row.verdict and "TO BE REPLACED" not in row.verdict for row in rows)
    assert len(lines(rows)) == 2 + len(rows)


def test_who_is_tighter_is_named_and_needs_a_reason() -> None:
    assert Row(CASES[0], (3.0, 3.5, 3.001, None, 2.9)).verdict == (
        "dp-accounting PLD is 0.100 tighter; stays: TO BE REPLACED"
    )
    assert "one package less" in Row(CASES[2], (3.0, 3.5, 3.0, None, 2.9)).verdict
    assert "none is tighter (Opacus PRV +0.0010)" in Row(CASES[0], (3.0, 3.5, 3.001, None, None)).verdict
    assert Row(RESPONSE, (None,) * 5).verdict == "nothing here draws such noise"


def test_without_dp_accounting_the_command_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(accountants, "installed", lambda: False)
    monkeypatch.setattr(accountants, "table", lambda: table(CASES[:1]))
    monkeypatch.setattr(sys, "argv", ["accountants"])
    assert accountants.main() == 0
    printed = capsys.readouterr().out
    assert "dp-accounting is not installed" in printed
    assert "| Gaussian, z = 4 | 10 | 3.3414 |" in printed


@pytest.mark.skipif(not installed(), reason="dp-accounting is not installed")
def test_dp_accounting_heeds_no_number_of_randomised_responses() -> None:
    (row,) = table(CASES[:1])
    assert costs(row)["dp-accounting PLD"] == pytest.approx(costs(row)["ours"], abs=accountants.TOLERANCE)
    by_number, one_by_one = counted_once()
    assert one_by_one == pytest.approx(10 * by_number, rel=1e-3)
