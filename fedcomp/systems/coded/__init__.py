"""Systems whose clients hand each other coded parts, so that some of them may vanish, or nobody reads a single one."""
