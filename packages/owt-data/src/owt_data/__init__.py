"""Text to token files to Ray Datasets, in a window order that is a pure function of seed and index.

`__init__.pyi` lists the public names. Each name loads on first use, because datasets and Ray take seconds to import.
"""

from importlib.metadata import version

import lazy_loader

__version__ = version("owt-data")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
