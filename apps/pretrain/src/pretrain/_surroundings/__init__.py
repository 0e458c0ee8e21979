"""The machine around a command: its environment, its cache, and the files that a command writes."""
