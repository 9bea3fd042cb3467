"""The server side of a deployment beyond loopback: certificates, keys, the proxy, and the command that starts them."""
