"""torch's own attention ops, those that return the log-sum-exp."""
