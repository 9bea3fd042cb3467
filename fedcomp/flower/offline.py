"""Keep Flower from talking to the network: telemetry, update check, dependency installation.

This module imports nothing of Flower: the telemetry switch is read once, while Flower is imported, so it has to be
set before.
"""

from __future__ import annotations

import os
import sys
import warnings

OFFLINE_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""What has to be in the environment so that Flower makes no connection of its own."""


class OfflineWarning(UserWarning):
    """Flower was imported with telemetry on; setting the environment now comes too late for this process."""


def go_offline() -> dict[str, str]:
    """Set Flower's offline switches for this process and its children; keep those the user has set.

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
