"""Hardware `local`: the training loop runs in this process, on its own devices."""

import os
import subprocess
import sys

import pytest

CODE = """
from pretrain import PRESETS
from pretrain._resolve.devices import check_batch
from ray_jax_launch import parse_hardware

check_batch(PRESETS["quickstart"](), parse_hardware("local"))
"""


@pytest.mark.parametrize(
    ("num_devices", "accepted"), [pytest.param(1, True, marks=pytest.mark.slow), (2, True), (3, False)]
)
def test_the_batch_is_checked_against_the_devices_of_this_process(num_devices, accepted):
    flags = f"--xla_force_host_platform_device_count={num_devices}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == accepted
    assert ("must be divisible by 3 (3 data-parallel devices" in done.stderr) != accepted
