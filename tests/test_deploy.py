"""The manifests: fields that KubeRay has, options that the application has, and sizes that fit each other."""

import re
import shlex

import pytest
import yaml
from support import ROOT

from pretrain import PretrainConfig
from pretrain._cli import parse_command
from pretrain._commands.train import check_batch
from ray_jax_launch import parse_hardware

MANIFESTS = sorted((ROOT / "deploy").glob("*.yaml"))
RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}

# Fields of KubeRay's API v1 (ray-operator/apis/ray/v1), as far as a job may need them; and of Kubernetes' pods.
JOB = {
    "entrypoint", "backoffLimit", "activeDeadlineSeconds", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
    "rayClusterSpec", "submissionMode", "runtimeEnvYAML", "entrypointNumCpus", "suspend",
}  # fmt: skip
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"}
HEAD = {"rayStartParams", "template", "serviceType"}
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}
POD = {"containers", "volumes", "nodeSelector", "tolerations", "serviceAccountName"}
CONTAINER = {"name", "image", "resources", "volumeMounts", "env"}


@pytest.fixture(params=MANIFESTS, ids=lambda path: path.stem)
def job(request):
    return yaml.safe_load(request.param.read_text())


def groups(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def options(job):
    command, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert command == "pretrain"
    config = parse_command(arguments)
    assert isinstance(config, PretrainConfig)
    return config


def test_there_is_one_for_gpus_and_one_for_tpus():
    assert [path.stem for path in MANIFESTS] == ["gpu", "tpu-v6e"]


def test_fields_are_kuberays(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) <= JOB
    assert set(job["spec"]["rayClusterSpec"]) <= CLUSTER
    head, *workers = groups(job)
    assert set(head) <= HEAD
    for group in workers:
        assert set(group) <= GROUP
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups(job):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert set(pod) <= POD
        (container,) = pod["containers"]
        assert set(container) <= CONTAINER
        # Kubernetes gives accelerators only where both are equal.
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_every_node_has_the_same_image_and_the_same_storage(job):
    containers = [group["template"]["spec"]["containers"][0] for group in groups(job)]
    assert len({container["image"] for container in containers}) == 1
    config = options(job)
    for container in containers:
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert any(config.storage_path.startswith(f"{path}/") for path in paths)
        assert any(config.data.startswith(f"{path}/") for path in paths)


def test_the_cluster_has_what_the_options_ask_for(job):
    config = options(job)
    hardware = parse_hardware(config.hardware)
    check_batch(config, hardware)
    head, accelerators, data = groups(job)
    (container,) = accelerators["template"]["spec"]["containers"]
    devices = int(container["resources"]["limits"][RESOURCES[hardware.kind]])
    assert devices == hardware.devices_per_worker
    assert accelerators["replicas"] * accelerators.get("numOfHosts", 1) == hardware.num_workers
    if hardware.kind == "tpu":
        assert accelerators["numOfHosts"] == hardware.workers_per_slice
        selector = accelerators["template"]["spec"]["nodeSelector"]
        assert selector["cloud.google.com/gke-tpu-topology"] == hardware.topology
    # One CPU for the worker and none for Ray Data, which has nodes of its own.
    assert accelerators["rayStartParams"]["num-cpus"] == "1"
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert "num-cpus" not in data["rayStartParams"]
    assert int(data["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]) * data["replicas"] >= 2


def test_versions_are_those_that_are_installed(job):
    requirements = (ROOT / "deploy" / "requirements.txt").read_text()
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']} " in requirements
    version = re.search(r'^version = "(.+)"$', (ROOT / "apps/pretrain/pyproject.toml").read_text(), re.M)
    assert version is not None
    assert all(group["template"]["spec"]["containers"][0]["image"].endswith(f":{version[1]}") for group in groups(job))


def test_the_image_installs_the_requirements_by_hash_and_every_member():
    recipe = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "--require-hashes --requirement /build/requirements.txt" in recipe
    for member in ("COPY packages ", "COPY apps "):
        assert member in recipe
    for source in re.findall(r"^COPY (\S+) ", recipe, re.M):
        assert (ROOT / source).exists()
