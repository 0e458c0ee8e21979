"""The arguments of the compilers of accelerators. `test_accelerators.py` runs the compilers."""

import os
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from nnx_gpt2 import absent_devices, device_facts, has_bfloat16, peak_flops_per_s
from nnx_gpt2._absent_devices import compiler_options


@pytest.mark.parametrize(
    ("name", "platform", "capability", "gigabytes", "teraflops"),
    [
        ("gpu:8:t4", "gpu", "7.5", 16, 65), ("gpu:1:l4", "gpu", "8.9", 24, 121), ("gpu:8:a100", "gpu", "8.0", 80, 312),
        ("gpu:2x4:h100", "gpu", "9.0", 80, 989), ("gpu:8:h200", "gpu", "9.0", 141, 989),
        ("gpu:8:b200", "gpu", "10.0", 180, 2250), ("tpu:v5e:2x4", "tpu", "", 16, 197),
        ("tpu:v5p:2x2x4", "tpu", "", 95, 459), ("tpu:v6e:4x4", "tpu", "", 32, 918),
    ],
)  # fmt: skip
def test_a_device_that_is_not_here_is_known_from_its_data_sheet(name, platform, capability, gigabytes, teraflops):
    facts = device_facts(name)
    assert (facts.platform, facts.compute_capability) == (platform, capability)
    assert facts.memory_bytes == pytest.approx(gigabytes * 1e9, rel=0.08)
    assert peak_flops_per_s(facts.device_kind) == pytest.approx(teraflops * 1e12)
    assert has_bfloat16(facts) == (not name.endswith("t4"))


@pytest.mark.parametrize("name", ["gpu:0:h100", "gpu:0x8:h100", "gpu:2x0:h100", "tpu:v6e:0x4", "tpu:v5p:2x2x0"])
def test_no_devices_are_rejected(name):
    for call in (device_facts, absent_devices):
        with pytest.raises(ValueError, match=r"^devices must be tpu:TYPE:TOPOLOGY .*, got '"):
            call(name)


def test_xla_does_not_time_kernels_on_a_gpu_that_is_not_here():
    options = [compiler_options(SimpleNamespace(platform=platform)) for platform in ("gpu", "tpu", "cpu")]
    assert options == [{"xla_gpu_autotune_level": 0}, None, None]
    assert compiler_options(jax.devices()[0]) is None


@pytest.mark.parametrize(
    ("name", "arguments", "topology"),
    [
        ("tpu:v5p:2x2x1", ("v5p:2x2x1", "tpu"), None),
        ("tpu:v6e:4x4", ("v6e:4x4", "tpu"), None),
        ("gpu:8:a100", ("a100", "cuda"), "1x1x8"),
        ("gpu:2x4:t4", ("t4", "cuda"), "1x2x4"),
    ],
)
def test_a_compiler_is_told_the_topology_and_the_device(name, arguments, topology, monkeypatch):
    """The variables of a TPU's host are set for the call, unless the user has set them."""
    calls: list[Any] = []

    def describe(*arguments, **options):
        calls.append((arguments, options, {key: os.environ.get(key) for key in variables}))
        return SimpleNamespace(devices=[1, 2])

    variables = ("TPU_SKIP_MDS_QUERY", "TPU_WORKER_HOSTNAMES")
    monkeypatch.setattr(topologies, "get_topology_desc", describe)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "mine")
    assert absent_devices(name) == [1, 2]
    ((found, options, environment),) = calls
    assert found == arguments
    assert "chips_per_host_bounds" not in options
    assert environment == {"TPU_SKIP_MDS_QUERY": None if topology else "1", "TPU_WORKER_HOSTNAMES": "mine"}
    assert "TPU_SKIP_MDS_QUERY" not in os.environ
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "mine"
    if topology:
        assert options["topology"] == topology
        capability, model = {"a100": ("major: 8 minor: 0", "A100"), "t4": ("major: 7 minor: 5", "T4")}[arguments[0]]
        assert capability in options["target_config"]
        assert model in options["target_config"]


@pytest.mark.parametrize(
    ("name", "bounds"), [("tpu:v6e:1x1", (1, 1, 1)), ("tpu:v5e:2x4", (2, 4, 1)), ("tpu:v6e:2x2", (2, 2, 1))]
)
def test_a_small_slice_is_one_host_as_on_google_cloud(name, bounds, monkeypatch):
    monkeypatch.setattr(topologies, "get_topology_desc", lambda *_, **options: SimpleNamespace(devices=[options]))
    assert absent_devices(name) == [{"chips_per_host_bounds": bounds}]
