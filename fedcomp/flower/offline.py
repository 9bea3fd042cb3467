"""Disabling Flower's own network access: telemetry, update check, dependency installation.

This module imports nothing of Flower: the telemetry switch is read once, while Flower is imported, so it has to be
set before.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping

OFFLINE_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""What has to be in the environment so that Flower makes no connection of its own."""


_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def proxied(environment: Mapping[str, str]) -> bool:
    """Whether a proxy is set, for any scheme."""
    return any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in environment)


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that keeps connections to this machine from going through a proxy.

    gRPC and Python's HTTP clients send even loopback connections to the proxy that ``http_proxy`` names, unless
    ``no_proxy`` lists their address; the proxy cannot reach this machine's loopback.

    Parameters
    ----------
    environment : mapping of str to str
        Its ``no_proxy``, or ``NO_PROXY``, is kept and extended.

    Returns
    -------
    dict of str to str
        ``no_proxy`` with the loopback names; empty where no proxy is set or all names are listed already.
    """
    if not proxied(environment):
        return {}
    before = environment.get("no_proxy", environment.get("NO_PROXY", ""))
    listed = [entry.strip() for entry in before.split(",") if entry.strip()]
    missing = [name for name in _LOOPBACK if name not in listed]
    return {"no_proxy": ",".join([*listed, *missing])} if missing and "*" not in listed else {}


class OfflineWarning(UserWarning):
    """Flower was imported with telemetry on; setting the environment now comes too late for this process."""


def go_offline() -> dict[str, str]:
    """Set Flower's offline switches for this process and its children; keep those the user has set.

    Where a proxy is set, connections to this machine are excepted from it (:func:`without_proxy`).

    Returns
    -------
    dict of str to str
        The variables that were set by this call; empty when all were there already.

    Warns
    -----
    OfflineWarning
        When Flower's telemetry module is already imported and enabled, although the user did not ask for it.
    """
    added = {name: value for name, value in OFFLINE_ENVIRONMENT.items() if name not in os.environ}
    added |= without_proxy(os.environ)
    os.environ.update(added)
    # Looked up, not imported: the import would read the switch, which is what has to be avoided.
    telemetry = sys.modules.get("flwr.supercore.telemetry")
    if "FLWR_TELEMETRY_ENABLED" in added and getattr(telemetry, "FLWR_TELEMETRY_ENABLED", "0") == "1":
        warnings.warn(
            "Flower was imported before go_offline() with telemetry on, and reads that switch only at import: this "
            "process may still report to telemetry.flower.ai. Call go_offline() before the first import of flwr, or "
            "start the process with FLWR_TELEMETRY_ENABLED=0",
            OfflineWarning,
            stacklevel=2,
        )
    return added
