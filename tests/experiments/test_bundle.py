"""The bundle that ``flwr run`` ships: small, and refused where another version of the library is installed."""

from __future__ import annotations

import importlib
import sys

import pytest

import fedcomp
from fedcomp.experiments.engines.superlink import APP
from fedcomp.flower._private import build_bundle


def load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(APP))
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedcomp_app"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("fedcomp_app.client_app")


def test_the_bundle_is_made_for_the_version_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedcomp.clients.app import app

    assert load(monkeypatch).app is app
    assert fedcomp.__version__ == sys.modules["fedcomp_app"].MADE_FOR


def test_another_version_is_refused_before_anything_else_of_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedcomp, "__version__", "0.0.7")
    # As where the module has another name.
    monkeypatch.setitem(sys.modules, "fedcomp.clients.app", None)
    with pytest.raises(RuntimeError, match=r"0\.0\.7 is installed here.*install fedcomp 0\.1\.0 here and restart"):
        load(monkeypatch)


def test_it_is_small() -> None:
    assert 1000 < len(build_bundle(APP)) < 20_000
