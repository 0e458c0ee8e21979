"""Measurements of `growth.py`: each module measures one part of the packages."""
