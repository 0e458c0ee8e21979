"""GPT-2 in Flax NNX: the model, its loss, optimizer, steps, sharding and sampling.

`__init__.pyi` lists the public names. Each loads on first use, so that reading a configuration does not import jax.
"""

from importlib.metadata import PackageNotFoundError, version

import lazy_loader

try:
    __version__ = version("nnx-gpt2")
except PackageNotFoundError:  # the sources are on the path, uninstalled
    __version__ = "0+uninstalled"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
