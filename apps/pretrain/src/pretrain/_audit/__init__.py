"""The audit of a run: its digests, its data, and its steps computed again."""
