"""A training loop on Ray Train's workers: launch, restart, stop."""
