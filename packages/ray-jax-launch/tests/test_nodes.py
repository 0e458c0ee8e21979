"""Clusters of several nodes: real processes on this machine. Workers and nodes are killed while a loop computes.

Each takes a minute or two. The times from a kill to the next step are logged (`--log-cli-level=INFO`).
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import ray
import ray.cloudpickle
import ray.data
from ray._private.accelerators.tpu import infer_tpu_pod_type_from_topology
from ray.train.v2.jax.config import JaxConfig

from ray_jax_launch import LaunchError, Result, auto, cpu, gpu, latest_step, launch, parse_hardware

pytestmark = pytest.mark.slow

log = logging.getLogger(__name__)

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_STEPS, SAVE_EVERY = 400, 10
RECOVERY_LIMIT_S = 60


def sum_each_step(config):
    """At each step add a number of each process, over all processes. Continue from checkpoints."""
    import json
    import os
    import time
    from pathlib import Path

    import jax
    import jax.numpy as jnp
    import numpy as np
    import ray
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from ray_jax_launch import Checkpoints, stop_requested

    folder, rank = Path(config["folder"]), jax.process_index()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    ones = jax.make_array_from_process_local_data(
        NamedSharding(mesh, PartitionSpec("data")), np.ones(jax.local_device_count(), np.float32)
    )
    add = jax.jit(lambda total, ones: total + ones.sum() / ones.size, out_shardings=replicated)
    node = ray.get_runtime_context().get_node_id()
    with Checkpoints(folder / "checkpoints") as checkpoints:
        start, total = checkpoints.latest_step() or 0, jax.device_put(jnp.float32(0), replicated)
        if start:
            total = checkpoints.restore(start, {"state": {"total": total}})["state"]["total"]
        for step in range(start + 1, config["num_steps"] + 1):
            total = add(total, ones)
            record = {
                "step": step, "total": float(total), "processes": jax.process_count(), "rank": rank,
                "pid": os.getpid(), "node": node, "time": time.time(),
            }  # fmt: skip
            with (folder / f"rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            time.sleep(0.1)
            stop = stop_requested(step)
            if stop or step % config["save_every"] == 0:
                checkpoints.save(step, {"state": {"total": total}}, metadata={})
                checkpoints.wait()
                if stop:
                    return None
                if multihost_utils.broadcast_one_to_all(np.bool((folder / "stop").exists())):
                    break
    return {"total": float(total), "processes": jax.process_count()}


class Run:
    """A launch in a thread, in parallel to the test."""

    def __init__(self, folder, hardware, num_steps=NUM_STEPS, save_every=SAVE_EVERY, max_failures=3):
        self.folder = folder
        self.result: Result | None = None
        self.error: BaseException | None = None
        config = {"folder": str(folder), "num_steps": num_steps, "save_every": save_every}
        self.thread = threading.Thread(target=self.run, args=(config, hardware, max_failures))
        self.thread.start()

    def run(self, config, hardware, max_failures):
        try:
            self.result = launch(
                sum_each_step,
                config,
                hardware=hardware,
                storage_path=self.folder,
                name="run",
                max_failures=max_failures,
            )
        except BaseException as error:
            self.error = error

    def records(self, rank=0):
        path = self.folder / f"rank-{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for(self, condition, timeout=180):
        """Return the first record of rank 0 that meets the condition."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.thread.is_alive():
            for record in self.records():
                if condition(record):
                    return record
            time.sleep(0.05)
        raise AssertionError(f"not met; last: {self.records()[-1:]}, {self.error!r}")

    def finish(self, timeout=240):
        self.thread.join(timeout)
        assert not self.thread.is_alive()
        assert self.error is None
        assert self.result is not None
        assert self.result.return_value is not None
        return self.result.return_value


def recovery(run, killed, began, what, limit_s=RECOVERY_LIMIT_S):
    """Return the first record of a process that is not among `killed`. It must come within the limit."""
    record = run.wait_for(lambda record: record["time"] > began and record["pid"] not in killed)
    seconds = record["time"] - began
    log.info("%s: %.1f s to step %d on %d processes", what, seconds, record["step"], record["processes"])
    assert seconds < limit_s
    return record


def test_every_rank_sees_the_processes_of_four_nodes(nodes, tmp_path):
    for _ in range(4):
        nodes.add_node(num_cpus=1)
    run = Run(tmp_path, cpu(4), num_steps=20)
    assert run.finish() == {"total": 20.0, "processes": 4}
    for rank in range(4):
        assert {record["processes"] for record in run.records(rank)} == {4}
    assert len({run.records(rank)[0]["node"] for rank in range(4)}) == 4


@pytest.mark.fault
@pytest.mark.parametrize("victim", ["rank 0", "rank 1", "node"])
def test_a_run_continues_after_a_kill_of(nodes, tmp_path, victim, record_property):
    added = [nodes.add_node(num_cpus=1) for _ in range(3)]  # one is a spare for the lost node
    run = Run(tmp_path, cpu(2))
    run.wait_for(lambda record: record["step"] == 3 * SAVE_EVERY + 5)
    rank = 0 if victim == "rank 0" else 1
    last = run.records(rank)[-1]
    killed = {run.records(0)[-1]["pid"], run.records(1)[-1]["pid"]}
    began = time.time()
    if victim == "node":
        nodes.remove_node(next(node for node in added if node.node_id == last["node"]), allow_graceful=False)
    else:
        os.kill(last["pid"], signal.SIGKILL)
    first = recovery(run, killed, began, victim)
    assert first["step"] >= 3 * SAVE_EVERY + 1
    record_property("fault", f"SIGKILL of {victim} of two")
    record_property("lost", "steps since the last checkpoint")
    record_property("recovery_s", round(first["time"] - began, 1))
    assert run.finish() == {"total": float(NUM_STEPS), "processes": 2}


@pytest.mark.fault
def test_an_elastic_run_shrinks_and_grows(nodes, tmp_path, record_property):
    first, second = (nodes.add_node(num_cpus=1) for _ in range(2))
    run = Run(tmp_path, cpu(2, min_workers=1), num_steps=3000)
    run.wait_for(lambda record: record["processes"] == 2 and record["step"] >= SAVE_EVERY + 5)
    killed = {run.records(0)[-1]["pid"], run.records(1)[-1]["pid"]}
    began = time.time()
    nodes.remove_node(second, allow_graceful=False)
    shrunk = recovery(run, killed, began, "a node of an elastic run")
    record_property("fault", "a node of an elastic run is lost, and later comes back")
    record_property("lost", "steps since the last checkpoint")
    record_property("recovery_s", round(shrunk["time"] - began, 1))
    assert shrunk["processes"] == 1
    assert first.node_id == run.records()[-1]["node"]
    began = time.time()
    nodes.add_node(num_cpus=1)
    grown = run.wait_for(lambda record: record["time"] > began and record["processes"] == 2)
    log.info("a node came back: %.1f s to step %d on 2 processes", grown["time"] - began, grown["step"])
    (tmp_path / "stop").touch()
    assert run.finish()["processes"] == 2
    totals = {record["step"]: record["total"] for record in run.records()}
    assert all(step == total for step, total in totals.items())


@pytest.mark.fault
def test_workers_leave_a_preempted_node_as_soon_as_the_loop_has_saved(nodes, tmp_path, record_property):
    """A cloud preempts a spot machine with an hour's notice. The loop saves at no other time."""
    added = [nodes.add_node(num_cpus=1) for _ in range(3)]
    run = Run(tmp_path, cpu(2), num_steps=600, save_every=10_000, max_failures=0)
    run.wait_for(lambda record: record["step"] == 30)
    killed = {run.records(0)[-1]["pid"], run.records(1)[-1]["pid"]}
    node = next(node for node in added if node.node_id == run.records(1)[-1]["node"])
    began = time.time()
    subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", nodes.address,
            "--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "taken back",
            "--deadline-remaining-seconds", "3600",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while (saved := latest_step(tmp_path / "checkpoints")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    log.info("saved step %d %.1f s after the notice", saved, time.time() - began)
    first = recovery(run, killed, began, "a node that is preempted in an hour")
    assert first["step"] == saved + 1
    assert node.node_id not in {run.records(rank)[-1]["node"] for rank in range(2)}
    assert run.finish() == {"total": 600.0, "processes": 2}
    record_property("fault", "a node is preempted, with an hour's notice")
    record_property("lost", "nothing")
    record_property("recovery_s", round(first["time"] - began, 1))


def note_host(config):
    """Write the host and TPU slice of this worker. There is no TPU to compute with."""
    import json
    import os
    from pathlib import Path

    import ray
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    node = ray.get_runtime_context().get_node_id()
    labels = next(entry["Labels"] for entry in ray.nodes() if entry["NodeID"] == node)
    host = [labels["ray.io/tpu-slice-name"], labels["ray.io/tpu-worker-id"], os.environ["JAX_PLATFORMS"]]
    (Path(config["folder"]) / f"host-{rank}").write_text(json.dumps(host))


@pytest.mark.parametrize("text", ["tpu:v6e:4x4", "tpu:v4:2x2x2:2", "tpu:v5e:2x4"])
def test_each_host_of_a_tpu_slice_has_one_worker(nodes, tmp_path, text):
    hardware = parse_hardware(text)
    assert hardware.topology is not None
    assert hardware.accelerator_type is not None
    pod_type = infer_tpu_pod_type_from_topology(hardware.topology, hardware.accelerator_type)
    for number in range(hardware.num_workers):
        slice_, host = divmod(number, hardware.workers_per_slice)
        nodes.add_node(
            num_cpus=1,
            resources={
                "TPU": hardware.devices_per_worker,
                f"accelerator_type:{hardware.accelerator_type}": 1,
                **({f"TPU-{pod_type}-head": 1} if host == 0 else {}),
            },
            labels={
                "ray.io/tpu-slice-name": f"slice-{slice_}",
                "ray.io/tpu-worker-id": str(host),
                "ray.io/tpu-topology": hardware.topology,
                "ray.io/tpu-pod-type": pod_type,
                "ray.io/accelerator-type": hardware.accelerator_type,
            },
            # GKE sets these, and Ray reads them when it reserves a slice.
            env_vars={"TPU_NAME": f"slice-{slice_}", "TPU_WORKER_ID": str(host)},
        )
    # Ray's plain JaxConfig does not join the workers: jax would look for the chips.
    launch(
        note_host, {"folder": str(tmp_path)}, hardware=hardware, storage_path=tmp_path, name="run", backend=JaxConfig()
    )
    hosts = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("host-*"))]
    slices = hardware.num_workers // hardware.workers_per_slice
    assert sorted(hosts) == [
        [f"slice-{slice_}", str(host), "tpu"] for slice_ in range(slices) for host in range(hardware.workers_per_slice)
    ]
    if slices == 1:
        assert auto() == hardware


def note_visible_device(config):
    """Write the GPUs that this worker may see. There is no GPU to compute with."""
    import os
    from pathlib import Path

    import ray.train

    rank = ray.train.get_context().get_world_rank()
    (Path(config["folder"]) / f"gpu-{rank}").write_text(os.environ["CUDA_VISIBLE_DEVICES"])


def test_workers_of_one_gpu_on_one_node_have_different_gpus(nodes, tmp_path):
    nodes.add_node(num_cpus=4, num_gpus=4)
    launch(note_visible_device, {"folder": str(tmp_path)}, hardware=gpu(4), storage_path=tmp_path, name="run")
    assert sorted(path.read_text() for path in tmp_path.glob("gpu-*")) == ["0", "1", "2", "3"]


def test_gpu_workers_have_the_library_path_of_their_node_without_cuda_toolkits(nodes, tmp_path):
    mounted, toolkit = tmp_path / "mounted", tmp_path / "toolkit"
    for folder, name in ((mounted, "libcuda.so.1"), (toolkit, "libcudart.so.12")):
        folder.mkdir()
        (folder / name).touch()
    nodes.add_node(num_cpus=1, num_gpus=1, env_vars={"LD_LIBRARY_PATH": f"{toolkit}:{mounted}"})
    given = {"hardware": gpu(1), "storage_path": tmp_path, "name": "run"}
    assert launch(lambda: os.environ["LD_LIBRARY_PATH"], **given).return_value == str(mounted)


def test_a_worker_of_four_gpus_sees_all_of_them(nodes, tmp_path):
    nodes.add_node(num_cpus=1, num_gpus=4)
    launch(note_visible_device, {"folder": str(tmp_path)}, hardware=gpu(1, 4), storage_path=tmp_path, name="run")
    assert (tmp_path / "gpu-0").read_text() == "0,1,2,3"


def test_workers_that_fit_on_no_node_are_rejected_at_once(nodes, tmp_path):
    for _ in range(2):
        nodes.add_node(num_cpus=2, num_gpus=4)
    began = time.monotonic()
    with pytest.raises(LaunchError, match=r"must have room for 1 workers of 8 GPUs each for gpu:1x8, got room for 0"):
        launch(note_visible_device, {"folder": str(tmp_path)}, hardware=gpu(1, 8), storage_path=tmp_path, name="run")
    assert time.monotonic() - began < 5


def count_rows(config):
    import jax
    from ray import train

    shard = train.get_dataset_shard("rows")
    assert shard is not None
    return jax.process_count(), sum(1 for _ in shard.iter_rows())


def test_an_elastic_group_leaves_a_cpu_to_ray_data(nodes, tmp_path):
    nodes.add_node(num_cpus=1)
    given = {"hardware": cpu(2, min_workers=1), "storage_path": tmp_path, "name": "run"}
    rows = {"rows": lambda rank, world_size: ray.data.range(5)}
    with pytest.raises(LaunchError, match=r"must have 2 CPUs, 1 for the workers of cpu:1-2 and 1 .* got 1"):
        launch(count_rows, {}, datasets=rows, **given)
    nodes.add_node(num_cpus=1)
    assert launch(count_rows, {}, datasets=rows, **given).return_value == (1, 5)


def read_in_step(config):
    """Read a dataset of this worker's own in step with the other workers, and return the number of rows."""
    import jax
    from jax.experimental import multihost_utils

    rows = ray.data.range(20_000, override_num_blocks=20).map_batches(lambda batch: batch, batch_size=None)
    rows.context.execution_options.preserve_order = True
    count = 0
    for batch in rows.iter_batches(batch_size=1000):
        count += len(batch["id"])
        multihost_utils.sync_global_devices(str(count))
    return jax.process_count(), count


def test_four_workers_with_executors_of_their_own_share_a_cpu_for_ray_data(nodes, tmp_path):
    hardware = cpu(4)
    nodes.add_node(num_cpus=4 + hardware.data_cpus)
    given = {"hardware": hardware, "storage_path": tmp_path, "name": "run", "data_cpus": hardware.data_cpus}
    assert launch(read_in_step, {}, **given).return_value == (4, 20_000)


def test_the_error_of_a_cluster_that_requires_a_token_names_the_variable(tmp_path, temporary):
    environment = os.environ | {"HOME": str(tmp_path), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    environment["RAY_TMPDIR"] = str(temporary)
    environment.pop("RAY_AUTH_MODE", None)  # Ray sets it in a process that started a cluster
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    subprocess.run([*ray_command, "get-auth-token", "--generate"], check=True, env=environment, capture_output=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [*ray_command, "start", "--head", "--block", f"--port={port}", "--include-dashboard=false"]
    with (tmp_path / "log").open("w") as log:
        head = subprocess.Popen(start, env=environment, stdout=log, stderr=log)
    try:
        while "Ray runtime started" not in (tmp_path / "log").read_text():
            assert head.poll() is None
            time.sleep(0.5)
        for mode, expected in [({}, "Set RAY_AUTH_MODE=token"), ({"RAY_AUTH_MODE": "token"}, "connected")]:
            done = subprocess.run(
                [sys.executable, "-c", "from ray_jax_launch import connect; connect(); print('connected')"],
                env=environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"} | mode,
                capture_output=True,
                text=True,
            )
            assert expected in (done.stdout + done.stderr).splitlines()[-1]
    finally:
        head.terminate()
        head.wait()
