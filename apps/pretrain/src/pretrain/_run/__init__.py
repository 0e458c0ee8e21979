"""The folder of a run, and the files in it."""
