"""Pictures and pages of runs."""
