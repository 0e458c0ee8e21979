"""Crash-safe checkpoints, in folders and in object storage."""
