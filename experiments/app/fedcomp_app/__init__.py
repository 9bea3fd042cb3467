"""Both halves of the app, imported from the installed library of the version that this bundle was made for.

Whoever has another one refuses every message with the remedy, before anything of the library is imported that may have
moved. Another version may train, encode or count differently without anybody noticing.
"""

import fedcomp

MADE_FOR = "0.1.0"

if fedcomp.__version__ != MADE_FOR:
    raise RuntimeError(
        f"fedcomp {fedcomp.__version__} is installed here, but this run was made for {MADE_FOR}; "
        f"install fedcomp {MADE_FOR} here and restart the node, or run the app of fedcomp {fedcomp.__version__}"
    )
