import dataclasses
import json
import os
import re
import sys
import time
from types import SimpleNamespace

import jax
import pytest
import ray
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY, infer_tpu_pod_type_from_topology
from ray._private.utils import update_envs
from ray.train import ScalingConfig
from ray.util.tpu import get_tpu_worker_resources

from ray_jax_launch import (
    DistributedConfig,
    Hardware,
    LaunchError,
    auto,
    backend_config,
    check_local_resources,
    check_resources,
    cpu,
    gpu,
    parse_hardware,
    scaling_config,
    tpu,
    worker_environment,
)
from ray_jax_launch._ray_internals.ray_cluster import placement_groups
from ray_jax_launch._scaling import hardware_of, resources_of, share_cpus
from ray_jax_launch._train.backend import _initialize


@pytest.mark.parametrize(
    ("text", "num_workers", "devices_per_worker"),
    [
        ("cpu:1", 1, 1),
        ("cpu:2", 2, 1),
        ("cpu:1-4", 4, 1),
        ("cpu:2x4", 2, 4),
        ("gpu:2-4x8", 4, 8),
        ("tpu:v6e:4x4:2", 8, 4),
        ("tpu:v6e:4x4:1-3", 12, 4),
        ("gpu:8", 8, 1),
        ("gpu:4x8", 4, 8),
        ("gpu:8:h100", 8, 1),
        ("gpu:1-2x8:a100-80g", 2, 8),
        ("tpu:v6e:4x4", 4, 4),
        ("tpu:v6e:2x4", 1, 8),
        ("tpu:v5e:2x2", 1, 4),
        ("tpu:v5e:16x16", 64, 4),
        ("tpu:v4:2x2x2", 2, 4),
        ("tpu:v5p:4x4x4", 16, 4),
        ("local", 1, 1),
    ],
)
def test_hardware_survives_a_round_trip_through_its_text(text, num_workers, devices_per_worker):
    hardware = parse_hardware(text)
    assert (hardware.num_workers, hardware.devices_per_worker) == (num_workers, devices_per_worker)
    assert hardware.num_devices == num_workers * devices_per_worker
    assert str(hardware) == text
    scaling = scaling_config(hardware)
    assert isinstance(scaling, ScalingConfig)
    assert scaling.max_workers == (0 if text == "local" else num_workers)
    assert scaling.min_workers == (0 if text == "local" else hardware.min_workers)
    found = hardware_of(scaling)
    # Ray does not know the devices that jax makes of CPUs.
    assert found == (dataclasses.replace(hardware, devices_per_worker=1) if hardware.kind == "cpu" else hardware)


@pytest.mark.parametrize("text", ["tpu:TPU-V6E:4x4", "tpu:tpu-v6e:4x4", "tpu:V6E:4x4"])
def test_a_tpu_type_may_be_written_as_ray_writes_it(text):
    assert parse_hardware(text) == tpu("v6e", "4x4")


def test_a_gpu_type_may_be_written_as_ray_writes_it():
    hardware = parse_hardware("gpu:2x8:H100")
    assert hardware == gpu(2, 8, gpu_type="h100")
    assert str(hardware) == "gpu:2x8:h100"
    assert scaling_config(hardware).total_resources["accelerator_type:H100"] == pytest.approx(0.002)


@pytest.mark.parametrize("name", ["", "h 100", "100", 7, "h" * 33])
def test_a_gpu_type_that_is_no_name_is_rejected(name):
    with pytest.raises(LaunchError, match="the GPU type must be a name such as h100, got"):
        gpu(8, gpu_type=name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "hardware must be auto, cpu:WORKERS"),
        ("auto", "got 'auto'. Connect, and call auto()"),
        ("cpu", "hardware must be auto, cpu:WORKERS"),
        ("cpu:two", "hardware must be auto, cpu:WORKERS"),
        ("gpu:2x", "hardware must be auto, cpu:WORKERS"),
        ("gpu:8:", "hardware must be auto, cpu:WORKERS"),
        ("cpu:8:h100", "hardware must be auto, cpu:WORKERS"),
        ("cpu:0", "the number of CPU workers must be a whole number of at least 1, got 0."),
        ("gpu:1x0", "the number of GPUs per worker must be a whole number of at least 1, got 0"),
        ("cpu:4-1", "the number of CPU workers must be a whole number of at least 4, got 1"),
        ("cpu:0-4", "the smallest number of CPU workers must be a whole number of at least 1, got 0"),
        ("tpu:v6e:4x4:0", "the number of TPU slices must be a whole number of at least 1, got 0"),
        ("tpu:v9:4x4", "the TPU type must be one of v2, v3, v4, v5e, v5litepod, v5p, v6e, v7x, got 'v9'"),
        ("tpu:v6e:16", "must be a shape such as 4x4 or 2x2x2, of whole hosts of 4 chips, got '16'"),
        ("tpu:v4:1x3x3", "must be a shape such as 4x4 or 2x2x2, of whole hosts of 4 chips, got '1x3x3'"),
    ],
)
def test_a_text_that_is_not_hardware_is_rejected(text, message):
    with pytest.raises(LaunchError, match=re.escape(message)):
        parse_hardware(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("cpu:2", [2]), ("gpu:1-3x8", [1, 2, 3]), ("tpu:v6e:4x4:1-2", [4, 8]), ("tpu:v6e:2x4:2", [2])],
)
def test_groups_grow_by_workers_or_by_whole_slices(text, counts):
    assert list(parse_hardware(text).worker_counts) == counts


def test_elastic_hardware_may_have_some_numbers_of_workers_only():
    hardware = parse_hardware("cpu:1-9").restricted_to(count for count in (8, 4, 2))
    assert list(hardware.worker_counts) == [2, 4, 8]
    assert (hardware.min_workers, hardware.num_workers, str(hardware)) == (2, 8, "cpu:2-8")
    assert list(hardware.restricted_to([4]).worker_counts) == [4]
    assert not hardware.restricted_to([4]).is_elastic
    assert parse_hardware("cpu:1-2").restricted_to([1, 2]) == parse_hardware("cpu:1-2")
    assert list(parse_hardware("tpu:v6e:4x4:1-3").restricted_to([4, 12]).worker_counts) == [4, 12]


@pytest.mark.parametrize(
    ("text", "counts"), [("cpu:1-4", []), ("cpu:2-4", [1, 2]), ("cpu:1-4", [5]), ("tpu:v6e:4x4:1-3", [4, 6])]
)
def test_numbers_of_workers_that_a_group_cannot_have_are_rejected(text, counts):
    with pytest.raises(LaunchError, match=f"must be among those of {text}, at least one, got"):
        parse_hardware(text).restricted_to(counts)
    with pytest.raises(LaunchError, match="must be among those of cpu:1-4"):
        parse_hardware("cpu:1-4").restricted_to([1, 2, 4]).restricted_to([3])


@pytest.mark.parametrize("counts", [None, 4, "14", [0, 1], [1.5], [[1]]])
def test_what_is_no_list_of_numbers_of_workers_is_rejected(counts):
    with pytest.raises(LaunchError, match=r"^(counts must be numbers of workers|a number of workers must be a whole)"):
        parse_hardware("cpu:1-4").restricted_to(counts)


@pytest.mark.parametrize("counts", [(), (2, 4), (1, 2), (1, 5, 4), (1, 3, 2, 4), (1, [2], 4), [1, 2, 4], ("1", "4")])
def test_allowed_counts_are_checked(counts):
    with pytest.raises(LaunchError, match="must be a tuple of ascending numbers of workers, from 1 to 4, got"):
        Hardware(kind="cpu", num_workers=4, min_workers=1, devices_per_worker=1, allowed_counts=counts)


@pytest.mark.parametrize("generation", sorted(VALID_TPU_TOPOLOGY))
def test_every_topology_has_as_many_workers_and_chips_as_in_ray(generation):
    for topology in VALID_TPU_TOPOLOGY[generation]:
        hardware = tpu(generation, topology)
        assert hardware.accelerator_type is not None
        num_workers, resources = get_tpu_worker_resources(topology, hardware.accelerator_type)
        assert (hardware.num_workers, hardware.devices_per_worker) == (num_workers, resources["TPU"]), topology
        assert parse_hardware(str(hardware)) == hardware
        assert scaling_config(hardware).resources_per_worker == resources


@pytest.mark.parametrize("generation", sorted(VALID_TPU_TOPOLOGY))
def test_auto_finds_every_slice_that_ray_knows_and_a_missing_host_is_an_error(generation, monkeypatch):
    for topology in VALID_TPU_TOPOLOGY[generation]:
        hardware = tpu(generation, topology)
        assert hardware.accelerator_type is not None
        pod_type = infer_tpu_pod_type_from_topology(topology, hardware.accelerator_type)
        node = {
            "Alive": True,
            "Resources": {"CPU": 1.0, "TPU": float(hardware.devices_per_worker)},
            "Labels": {"ray.io/tpu-topology": topology, "ray.io/tpu-pod-type": pod_type},
        }
        monkeypatch.setattr("ray.nodes", lambda node=node, count=hardware.num_workers: [node] * count)
        assert auto() == hardware
        check_resources(hardware)
        monkeypatch.setattr("ray.nodes", lambda node=node, count=hardware.num_workers: [node] * (count - 1))
        with pytest.raises(LaunchError, match=rf"must have {hardware.num_devices} TPUs for {hardware}, got"):
            check_resources(hardware)


@pytest.mark.parametrize(
    ("gpus", "hardware"),
    [
        ([4, 4], gpu(2, 4)),
        ([4, 2], gpu(6)),
        ([0, 3], gpu(1, 3)),
        ([1, 1], gpu(2)),
        ([0], cpu(1)),
        ([0.5, 3, 3], gpu(2, 3)),
    ],
    ids=str,
)
def test_auto_takes_all_gpus_of_living_nodes(gpus, hardware, monkeypatch):
    found = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": float(number)}} for number in gpus]
    monkeypatch.setattr("ray.nodes", lambda: [*found, {"Alive": False, "Resources": {"CPU": 8.0, "GPU": 8.0}}])
    assert auto() == hardware


@pytest.mark.parametrize(
    ("text", "data_cpus", "nodes", "shortage"),
    [
        ("gpu:1x4", 0, [(8, 4)], None),
        ("gpu:1x4", 0, [(8, 2), (8, 2)], "for 1 workers of 4 GPUs each for gpu:1x4, got room for 0 on nodes of 2, 2"),
        ("gpu:2x2", 0, [(8, 3), (8, 1)], "for 2 workers of 2 GPUs each for gpu:2x2, got room for 1 on nodes of 3, 1"),
        ("gpu:1-4x2", 0, [(8, 2)], None),
        ("gpu:2-4x2", 0, [(8, 2)], "must have 4 GPUs for gpu:2-4x2, got 2"),
        ("cpu:1-4", 0, [(1, 0)], None),
        ("cpu:1-4", 1, [(1, 0)], "have 2 CPUs, 1 for the workers of cpu:1-4 and 1 for the tasks of Ray Data, got 1"),
        ("gpu:2", 0, [(1, 2)], "must have 2 CPUs, 2 for the workers of gpu:2 and 0 for the tasks of Ray Data, got 1"),
    ],
)  # fmt: skip
def test_a_cluster_must_have_the_resources_of_the_smallest_group(text, data_cpus, nodes, shortage, monkeypatch):
    found = [{"Alive": True, "Resources": {"CPU": float(cpus), "GPU": float(gpus)}} for cpus, gpus in nodes]
    found.append({"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}})
    monkeypatch.setattr("ray.nodes", lambda: found)
    if shortage is None:
        check_resources(parse_hardware(text), data_cpus=data_cpus)
        return
    with pytest.raises(LaunchError, match=re.escape(shortage)):
        check_resources(parse_hardware(text), data_cpus=data_cpus)


@pytest.mark.parametrize(
    ("text", "shortage"),
    [
        ("gpu:8:a100", None),
        ("gpu:1x8:a100", None),
        ("gpu:12", None),
        ("gpu:8:h100", "The Ray cluster must have 8 H100 GPUs for gpu:8:h100, got 4"),
        ("gpu:2x4:h100", "The Ray cluster must have 8 H100 GPUs for gpu:2x4:h100, got 4"),
        ("gpu:2x2:h100", "room for 2 workers of 2 H100 GPUs each for gpu:2x2:h100, got room for 1 on nodes of 3, 1, 0"),
        ("gpu:1:l4", "The Ray cluster must have 1 L4 GPUs for gpu:1:l4, got 0"),
    ],
)
def test_only_nodes_with_the_type_of_gpu_count(text, shortage, monkeypatch):
    nodes = [("A100", 8.0), ("H100", 3.0), ("H100", 1.0)]
    found = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": number, f"accelerator_type:{name}": 1.0}}
        for name, number in nodes
    ]
    monkeypatch.setattr("ray.nodes", lambda: found)
    if shortage is None:
        check_resources(parse_hardware(text))
        return
    with pytest.raises(LaunchError, match=re.escape(shortage)):
        check_resources(parse_hardware(text))


@pytest.mark.parametrize(
    ("text", "has", "shortage"),
    [
        (
            "gpu:1",
            {},
            "This machine must have 1 GPUs for gpu:1, got 0. Ask for other hardware, or set RAY_ADDRESS to a",
        ),
        ("gpu:3", {"GPU": 2}, "This machine must have 3 GPUs for gpu:3, got 2."),
        ("gpu:2-4", {"GPU": 2}, None),
        ("gpu:2x2", {"GPU": 5}, None),
        (
            "gpu:1:h100",
            {"GPU": 1, "accelerator_type:A100": 1},
            "must have 1 H100 GPUs for gpu:1:h100, got 0",
        ),
        ("gpu:1:a100", {"GPU": 1, "accelerator_type:A100": 1}, None),
        ("tpu:v6e:4x4", {"TPU": 4}, "This machine must have 16 TPUs for tpu:v6e:4x4, got 4"),
        ("cpu:900", {}, None),  # logical CPUs
        ("local", {}, None),
    ],
)
def test_devices_of_this_machine_are_counted_before_ray_starts(text, has, shortage, monkeypatch):
    """Ray reads the variable in the place of the devices that it finds."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", json.dumps(has))
    if shortage is None:
        check_local_resources(parse_hardware(text))
    else:
        with pytest.raises(LaunchError, match=re.escape(shortage)):
            check_local_resources(parse_hardware(text))
    assert not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")
    check_local_resources(parse_hardware(text))
    monkeypatch.setenv("RAY_ADDRESS", "local")
    if shortage is not None:
        with pytest.raises(LaunchError, match=re.escape(shortage)):
            check_local_resources(parse_hardware(text))


def test_devices_that_the_variables_of_this_process_contradict_are_an_error(monkeypatch):
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 3}')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(
        LaunchError, match=r"^Ray could not start on this machine: .* CUDA_VISIBLE_DEVICES contains \['0'\]\. "
    ):
        check_local_resources(gpu(3))


def test_jax_takes_nine_tenths_of_a_gpu_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert worker_environment(gpu(2))["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.9"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    assert worker_environment(gpu(2))["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    with monkeypatch.context() as newer:  # jax rejects both names together
        newer.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION")
        newer.setenv("XLA_CLIENT_MEM_FRACTION", ".7")
        found = worker_environment(gpu(2))
        assert found["XLA_CLIENT_MEM_FRACTION"] == "0.7"
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in found
    for wrong in ("half", "0", "1.5", "nan"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", wrong)
        with pytest.raises(LaunchError, match="XLA_PYTHON_CLIENT_MEM_FRACTION must be a number above 0 and at most 1"):
            worker_environment(gpu(2))


def test_the_flags_of_a_tpu_node_come_after_ours_and_win(monkeypatch):
    """Ray calls `update_envs` in each new worker."""
    found = []
    for own in ("", "--xla_enable_async_all_reduce=false --xla_tpu_other=1"):
        monkeypatch.setenv("LIBTPU_INIT_ARGS", own)
        update_envs({"LIBTPU_INIT_ARGS": worker_environment(tpu("v6e", "4x4"))["LIBTPU_INIT_ARGS"]})
        found.append(os.environ["LIBTPU_INIT_ARGS"].split())
        assert found[-1][3:] == own.split()
    assert found[0] == found[1][:3]
    assert found[0][0] == "--xla_enable_async_all_reduce=true"


def test_the_users_own_glibc_tunables_are_kept(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    assert worker_environment(cpu(1))["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=2"


def test_presets_set_what_ray_and_jax_need():
    assert scaling_config(gpu(2, 4)).resources_per_worker == {"CPU": 1, "GPU": 4}
    tunables = f"glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold={1 << 40}:glibc.malloc.hugetlb=1"
    assert worker_environment(cpu(2)) == {"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": tunables}
    assert worker_environment(cpu(2, 4))["JAX_NUM_CPU_DEVICES"] == "4"
    assert worker_environment(gpu(2))["JAX_PLATFORMS"] == "cuda"
    assert worker_environment(tpu("v6e", "4x4"))["JAX_PLATFORMS"] == "tpu"
    assert worker_environment(parse_hardware("local")) == {}
    slice_ = scaling_config(tpu("v6e", "4x4"))
    assert (slice_.use_tpu, slice_.accelerator_type, slice_.topology) == (True, "TPU-V6E", "4x4")
    assert slice_.resources_per_worker == {"CPU": 1, "TPU": 4}
    assert backend_config(tpu("v6e", "4x4")).use_tpu
    assert not backend_config(gpu(2)).use_tpu


@pytest.mark.parametrize(
    ("num_cpus", "num_workers", "data_cpus", "share"),
    [
        (2, 2, 1, 0.5),
        (1.5, 2, 1, 0.25),
        (3, 2, 1, None),
        (16, 2, 1, None),
        (1, 2, 1, None),
        (8, 9, 1, 0.77),  # 9 x 0.78 would leave less than a CPU
        (8, 9, 2, 0.66),
        (4, (1, 6), 1, 0.5),
    ],
)
def test_workers_share_the_cpus_that_ray_data_leaves(num_cpus, num_workers, data_cpus, share):
    shared = share_cpus(ScalingConfig(num_workers=num_workers), num_cpus, data_cpus).resources_per_worker
    assert shared == (None if share is None else {"CPU": share})


def test_workers_that_share_a_cpu_keep_their_other_resources():
    resources = {"CPU": 1, "GPU": 2, "memory": 8e9}
    given = ScalingConfig(num_workers=4, use_gpu=True, resources_per_worker=resources)
    assert share_cpus(given, 4, data_cpus=1).resources_per_worker == {**resources, "CPU": 0.75}


@pytest.mark.parametrize("end", ["time", "interrupt"])
def test_a_request_to_the_autoscaler_ends_with_the_wait(end, monkeypatch):
    requests = []

    def wait(seconds):
        if end == "interrupt":
            raise KeyboardInterrupt
        sleep(seconds)

    sleep = time.sleep
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Resources": {"CPU": 3.0}}])
    monkeypatch.setattr("ray_jax_launch._cluster.request_resources", lambda bundles: requests.append(bundles))
    monkeypatch.setattr("ray_jax_launch._cluster.time.sleep", wait)
    with pytest.raises(KeyboardInterrupt if end == "interrupt" else LaunchError):
        check_resources(parse_hardware("gpu:2-3x4"), data_cpus=1, wait_for_resources_s=0.5)
    assert requests == [[{"CPU": 1, "GPU": 4}, {"CPU": 1, "GPU": 4}, {"CPU": 1}], []]


def test_placement_groups_of_other_drivers_and_removed_ones_are_not_ours(monkeypatch):
    table = {f"{'1' * 28}01000000": "CREATED", f"{'2' * 28}01000000": "REMOVED", f"{'3' * 28}02000000": "CREATED"}
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr(
        "ray_jax_launch._ray_internals.ray_cluster.placement_group_table",
        lambda: {id: {"state": state} for id, state in table.items()},
    )
    assert placement_groups() == {f"{'1' * 28}01000000"}


def test_cpus_that_a_script_asks_for_are_not_shared():
    given = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2})
    assert share_cpus(given, 2, data_cpus=1) == given


def test_hosts_of_tpus_do_not_share_their_cpus() -> None:
    given = scaling_config(tpu("v6e", "4x4"))
    assert share_cpus(given, 4, data_cpus=1) is given


@pytest.mark.parametrize(
    ("hardware", "given", "resources"),
    [
        (gpu(2, 3), {"CPU": 7}, {"CPU": 7, "GPU": 3}),
        (gpu(2, 3), {"room": 0.5}, {"CPU": 1, "GPU": 3, "room": 0.5}),
        (gpu(2, 3, min_workers=1), {"GPU": 1, "memory": 9e9}, {"CPU": 1, "GPU": 1, "memory": 9e9}),
        (cpu(3), {}, {"CPU": 1}),
        (cpu(3), {"CPU": 0}, {"CPU": 0}),
        (tpu("v6e", "4x4"), {"CPU": 7}, {"CPU": 7, "TPU": 4}),
    ],
    ids=str,
)
def test_resources_are_added_to_those_of_the_hardware(
    hardware: Hardware, given: dict[str, float], resources: dict[str, float]
) -> None:
    scaling = scaling_config(hardware, resources_per_worker=given)
    assert scaling.resources_per_worker == resources
    found = {name: amount for name, amount in resources_of(scaling).items() if not name.startswith("accelerator_type")}
    assert found == {name: amount for name, amount in resources.items() if amount}
    assert (scaling.min_workers, scaling.max_workers) == (hardware.min_workers, hardware.num_workers)


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"])
def test_each_strategy_and_the_labels_of_each_worker_reach_ray(strategy: str) -> None:
    labels = [{"region": "here"}, {"region": "there"}, {}]
    scaling = scaling_config(cpu(3), placement_strategy=strategy, label_selector=labels)
    assert (scaling.placement_strategy, scaling.label_selector) == (strategy, labels)


def test_gpu_workers_keep_the_folders_of_the_driver_and_lose_those_of_cuda_toolkits(monkeypatch, tmp_path):
    toolkit = ("cublas", "cublasLt", "cudart", "cudnn", "cufft", "cupti", "cusolver", "cusparse", "nccl", "nvJitLink")
    files = {name: f"lib{name}.so.12" for name in (*toolkit, "nvrtc")}
    files |= {"mounted": "libcuda.so.1", "other": "libfoo.so", "driver": "libcudart.so.12"}
    for folder, name in files.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
    (tmp_path / "driver" / "libcuda.so.1").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(str(tmp_path / folder) for folder in (*files, "missing")))
    kept = ":".join(str(tmp_path / folder) for folder in ("mounted", "other", "driver", "missing"))
    assert worker_environment(gpu(2))["LD_LIBRARY_PATH"] == kept


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the interface")
@pytest.mark.parametrize(
    ("is_ours", "given", "interface"), [(True, None, "lo"), (False, None, None), (True, "eth0", None)], ids=str
)
def test_nccl_uses_the_loopback_interface_of_a_cluster_on_this_machine(monkeypatch, is_ours, given, interface):
    monkeypatch.setattr("ray_jax_launch._train.backend.is_started_here", lambda: is_ours)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    assert worker_environment(gpu(2)).get("NCCL_SOCKET_IFNAME") == interface


def test_a_library_path_without_cuda_toolkits_is_not_touched(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/nvidia/lib64:")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert worker_environment(gpu(2)) == {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}


@pytest.mark.parametrize(
    ("text", "data_cpus"), [("cpu:1", 1), ("cpu:8", 1), ("cpu:9", 2), ("gpu:4x8", 1), ("cpu:1-9", 1), ("gpu:1000", 125)]
)
def test_eight_workers_share_a_cpu_for_ray_data(text, data_cpus):
    assert parse_hardware(text).data_cpus == data_cpus


@pytest.mark.parametrize(("coordinator", "bind"), [("10.0.0.1:5", None), ("127.0.0.1:5", "127.0.0.1:5")])
def test_each_timeout_reaches_jax_under_its_own_name(monkeypatch, coordinator, bind):
    given, kept = {}, []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **kwargs: given.update(args=args, **kwargs))
    # It would change all of a process.
    monkeypatch.setattr("ray_jax_launch._train.backend._keep_gloo_on_loopback", lambda: kept.append(dict(given)))
    timeouts = DistributedConfig(initialization_timeout_s=1, heartbeat_timeout_s=2, shutdown_timeout_s=3)
    _initialize(coordinator, 4, 3, timeouts)
    assert given == {
        "args": (coordinator, 4, 3),
        "coordinator_bind_address": bind,
        "initialization_timeout": 1,
        "heartbeat_timeout_seconds": 2,
        "shutdown_timeout_seconds": 3,
    }
    assert kept == ([] if bind is None else [{}])  # before jax is initialized
