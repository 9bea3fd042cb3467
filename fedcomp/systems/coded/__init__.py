"""Systems in which clients exchange coded shards, so that some may vanish or no single update is readable."""
