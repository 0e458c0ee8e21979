"""JAX training loops under Ray Train, on CPUs, GPUs or TPU slices.

`__init__.pyi` lists the public names. Each name loads on first use: `parse_hardware` imports neither Ray nor jax.
"""

import os
import sys
from importlib.metadata import version

import lazy_loader

# Under `uv run`, Ray would upload the working folder and start every worker by `uv run` again. Ray reads this variable
# when it is first imported, which may have been before this package was.
_UV_RUN = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
if _UV_RUN not in os.environ:
    os.environ[_UV_RUN] = "0"
    if (_constants := sys.modules.get("ray._private.ray_constants")) is not None:
        setattr(_constants, _UV_RUN, False)

__version__ = version("ray-jax-launch")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
