"""The server's side of a deployment beyond loopback: certificates and keys, the proxy, and what starts all of it."""
