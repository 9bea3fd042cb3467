"""Systems whose clients protect what they send themselves; the server adds no noise."""
