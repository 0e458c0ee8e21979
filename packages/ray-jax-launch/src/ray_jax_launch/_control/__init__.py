"""Between the driver and the workers of a launch: stop requests, metrics, events and log lines."""
