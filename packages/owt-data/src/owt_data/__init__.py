"""Text to token files to Ray Datasets, in a window order that is a pure function.

`__init__.pyi` lists the public names. Each one loads on first use: to read an option imports neither datasets nor Ray.
"""

from importlib.metadata import version

import lazy_loader

__version__ = version("owt-data")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
