"""The package's logger: a child of Flower's, so that its lines appear beside Flower's (:mod:`.flower.logs`).

The name is all that is Flower's in it, so that packages that do not know Flower can log here too.
"""

from __future__ import annotations

import logging
from typing import Final

log: Final = logging.getLogger("flwr.fedcomp")

ROUNDS_VARIABLE: Final = "FEDCOMP_ROUNDS"
"""Environment variable that names a file, to which the end of every training round is added as a line of JSON: for
``fedcomp link``, which starts server apps by way of a process that does not pass on what they print."""
