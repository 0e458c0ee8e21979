"""JAX training loops under Ray Train, on CPUs, GPUs or TPU slices.

`__init__.pyi` lists the public names. Each name loads on first use: `parse_hardware` imports neither Ray nor jax.
"""

import os
from importlib.metadata import version

import lazy_loader

# Under `uv run`, Ray would upload the working folder and start every worker by `uv run` again. Ray reads this variable
# when it is first imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

__version__ = version("ray-jax-launch")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
