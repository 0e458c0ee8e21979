"""Ray Datasets: token windows in the order of steps, and blocks of text tokenized during training."""
