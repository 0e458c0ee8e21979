"""What every worker runs."""
