"""The screen: the live view of a run, its lines without a terminal, and the tables around them."""
