"""Starts an edge node."""

import sys

from fedcomp.clients.edge import main

if __name__ == "__main__":
    sys.exit(main())
