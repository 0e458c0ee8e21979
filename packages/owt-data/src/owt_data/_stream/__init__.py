"""Ray Datasets of token windows."""
