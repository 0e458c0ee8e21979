"""From the configuration that a user gives to a run that can start."""
