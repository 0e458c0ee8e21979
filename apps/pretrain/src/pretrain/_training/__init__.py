"""The training of a run, in each worker."""
