"""The comparison of runs: statistics, without files."""
