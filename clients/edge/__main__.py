"""Starts an edge node."""

from fedcomp.clients.edge import main

main()
