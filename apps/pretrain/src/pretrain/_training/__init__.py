"""The training loop of every worker."""
