"""Kubernetes manifests, the image, and clusters without Kubernetes.

Manifests are compared with the fields of KubeRay and with the options of the application. The cluster of `ray up` is
checked by Ray's schema. The job for SLURM starts real Ray nodes.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from pathlib import Path

import click
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import cli as ray_command
from support import ROOT, started, wait_until

from pretrain import PretrainConfig
from pretrain._cli import parse_command
from pretrain._resolve.devices import check_batch
from ray_jax_launch import parse_hardware

VERSION = tomllib.loads((ROOT / "apps/pretrain/pyproject.toml").read_text())["project"]["version"]
IMAGE = f"REGISTRY/gpt2-on-ray:{VERSION}"
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text()
MANIFESTS = [path for path in sorted((ROOT / "deploy").glob("*.yaml")) if "kind: RayJob" in path.read_text()]
RAY_UP = ROOT / "deploy" / "ray-up.yaml"
SLURM = ROOT / "deploy" / "slurm.sh"
PAGE = ROOT / "docs" / "clusters.md"
BLOCKS = [
    (language, textwrap.dedent(block))
    for _, language, block in re.findall(r"^( *)```(\w*)\n(.*?)^\1```", PAGE.read_text(), re.M | re.S)
]
RESOURCES = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}

# Some fields of KubeRay's API v1 (ray-operator/apis/ray/v1) and of pods in Kubernetes.
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


def worker_groups(job):
    return groups(job)[1:]


def containers(job):
    return [container for group in groups(job) for container in group["template"]["spec"]["containers"]]


def options(job):
    command, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert command == "pretrain"
    config = parse_command(arguments)
    assert isinstance(config, PretrainConfig)
    return config


def test_manifests_exist_for_gpus_and_for_tpus():
    assert [path.stem for path in MANIFESTS] == ["gpu", "tpu-v6e"]


def test_the_job_has_only_fields_of_kuberay(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(job["spec"]) <= JOB
    assert set(job["spec"]["rayClusterSpec"]) <= CLUSTER


def test_groups_have_only_fields_of_kuberay(job):
    head, *workers = groups(job)
    assert set(head) <= HEAD
    for group in workers:
        assert set(group) <= GROUP


def test_pods_have_only_fields_of_kubernetes(job):
    for group in groups(job):
        assert set(group["template"]["spec"]) <= POD
    for container in containers(job):
        assert set(container) <= CONTAINER


def test_ray_start_parameters_are_strings(job):
    for group in groups(job):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_number_of_replicas_is_within_its_bounds(job):
    for group in worker_groups(job):
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_each_pod_has_one_container(job):
    assert len(containers(job)) == len(groups(job))


def test_requests_of_resources_equal_their_limits(job):
    # Kubernetes requires this for accelerators.
    for container in containers(job):
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_each_mounted_volume_is_declared(job):
    for group in groups(job):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_all_nodes_mount_the_folders_of_runs_and_of_tokens(job):
    config = options(job)
    for container in containers(job):
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert any(config.storage_path.startswith(f"{path}/") for path in paths)
        assert any(config.data.startswith(f"{path}/") for path in paths)


def test_the_batch_is_divisible_by_the_devices(job):
    config = options(job)
    check_batch(config, parse_hardware(config.hardware))


def test_the_cluster_has_the_accelerators_of_the_option_hardware(job):
    hardware = parse_hardware(options(job).hardware)
    accelerators, _ = worker_groups(job)
    (container,) = accelerators["template"]["spec"]["containers"]
    assert int(container["resources"]["limits"][RESOURCES[hardware.kind]]) == hardware.devices_per_worker
    assert accelerators["replicas"] * accelerators.get("numOfHosts", 1) == hardware.num_workers
    if hardware.kind == "tpu":
        assert accelerators["numOfHosts"] == hardware.workers_per_slice
        selector = accelerators["template"]["spec"]["nodeSelector"]
        assert selector["cloud.google.com/gke-tpu-topology"] == hardware.topology


def test_ray_data_has_cpus_only_on_the_data_nodes(job):
    head, accelerators, data = groups(job)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert accelerators["rayStartParams"]["num-cpus"] == "1"  # the training worker's
    assert "num-cpus" not in data["rayStartParams"]
    assert int(data["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]) * data["replicas"] >= 2


def test_the_cluster_runs_the_locked_version_of_ray(job):
    requirements = (ROOT / "deploy" / "requirements.txt").read_text()
    assert f"ray=={job['spec']['rayClusterSpec']['rayVersion']} " in requirements


def test_all_nodes_run_the_image_of_the_current_version(job):
    assert {container["image"] for container in containers(job)} == {IMAGE}


@pytest.mark.parametrize("file", ["docs/clusters.md", "deploy/Dockerfile"])
def test_the_build_command_names_the_image_of_the_current_version(file):
    assert f"--build-arg ACCELERATOR=cuda12 -t {IMAGE} ." in (ROOT / file).read_text()


def test_the_page_names_no_other_image():
    assert set(re.findall(r"gpt2-on-ray:([\w.]+)", PAGE.read_text())) == {VERSION}


@pytest.mark.parametrize("block", [block for language, block in BLOCKS if language == "yaml"], ids=lambda b: b[:40])
def test_the_objects_of_the_page_are_yaml_with_fields_of_kubernetes(block):
    found = yaml.safe_load(block)
    if "kind" in found:
        assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
    else:  # a part of a pod or of a container, or a configuration of Prometheus
        assert set(found) <= POD | CONTAINER | {"scrape_configs"}


def test_the_variables_of_the_page_fit_every_container(job):
    given = [
        yaml.safe_load(block) for language, block in BLOCKS if language == "yaml" and block.startswith("# in each")
    ]
    assert len(given) == 2
    for container in containers(job):
        for part in given:
            names = [variable["name"] for variable in container.get("env", []) + part["env"]]
            assert len(set(names)) == len(names)


def test_the_readme_lists_every_file_of_the_folder():
    listed = re.findall(r"^\| \[([^]]+)\]", (ROOT / "deploy" / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "deploy").iterdir() if path.name != "README.md")


def test_the_image_installs_the_requirements_by_hash():
    install, members = re.findall(r"^RUN (pip install .*)", DOCKERFILE.replace("\\\n", ""), re.M)
    assert "--require-hashes --requirement /build/requirements.txt " in install
    assert "${ACCELERATOR:+--requirement /build/requirements-$ACCELERATOR.txt}" in install
    assert "--no-deps" in members


@pytest.mark.parametrize(
    ("accelerator", "needed"),
    [
        ("cuda12", {"jax-cuda12-pjrt", "jax-cuda12-plugin", "nvidia-cudnn-cu12", "nvidia-nccl-cu12"}),
        ("cuda13", {"jax-cuda13-pjrt", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"}),
        ("tpu", {"libtpu"}),
    ],
)
def test_the_requirements_of_an_accelerator_add_to_those_of_all_nodes(accelerator, needed):
    added = (ROOT / "deploy" / f"requirements-{accelerator}.txt").read_text()
    names = set(re.findall(r"^([\w-]+)==", added, re.M))
    assert needed <= names
    common = set(re.findall(r"^([\w-]+)==", (ROOT / "deploy" / "requirements.txt").read_text(), re.M))
    assert not names & common


@pytest.mark.parametrize("folder", ["packages", "apps"])
def test_the_image_has_all_members(folder):
    assert f"COPY {folder} " in DOCKERFILE


def test_the_image_copies_only_files_that_exist():
    sources = re.findall(r"^COPY (\S+) ", DOCKERFILE, re.M)
    assert [source for source in sources if not list(ROOT.glob(source))] == []


@pytest.fixture
def cluster():
    """The cluster of `ray up`, with Ray's defaults."""
    return prepare_config(yaml.safe_load(RAY_UP.read_text()))


def test_the_cluster_of_ray_up_has_rays_schema(cluster):
    validate_config(cluster)
    with pytest.raises(Exception, match="Additional properties are not allowed"):
        validate_config(cluster | {"start_ray_commands": []})


def test_the_cluster_of_ray_up_starts_all_its_nodes(cluster):
    (node_type,) = cluster["available_node_types"].values()
    assert node_type["min_workers"] == node_type["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_the_cluster_of_ray_up_runs_the_image_of_the_current_version(cluster):
    assert cluster["docker"]["image"] == IMAGE


@pytest.mark.parametrize("role", ["head", "worker"])
def test_ray_knows_the_options_with_which_the_nodes_start(cluster, role):
    stop, start = cluster[f"{role}_start_ray_commands"]
    assert stop == "ray stop"
    program, subcommand, *options = shlex.split(start)
    assert (program, subcommand) == ("ray", "start")
    ray_command.commands["start"].make_context("start", options)  # raises on an unknown option


def arguments_of(program, line):
    """Yield the arguments of a program in a line of a shell, also in a quoted command."""
    words = shlex.split(line, comments=True)
    for word in words:
        if " " in word:
            yield from arguments_of(program, word)
    if program in words:
        yield words[words.index(program) + 1 :]


def uses_in_the_page(program):
    lines = [line for language, block in BLOCKS if not language for line in block.splitlines()]
    return [arguments for line in lines for arguments in arguments_of(program, line)]


@pytest.mark.parametrize("arguments", uses_in_the_page("pretrain"), ids=" ".join)
def test_the_application_accepts_the_commands_of_the_page(arguments):
    # They need a cluster: the real parser reads them, and the sizes of a run on GPUs or TPUs are checked.
    config = parse_command(arguments)
    if isinstance(config, PretrainConfig):
        check_batch(config, parse_hardware(config.hardware))


@pytest.mark.parametrize("arguments", uses_in_the_page("ray"), ids=" ".join)
def test_ray_accepts_the_commands_of_the_page(arguments):
    command, arguments = ray_command, list(arguments)
    if arguments[0] == "job" and "job" not in command.commands:
        pytest.skip("needs ray[default]")
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    command.make_context(command.name, arguments)  # raises on an unknown option or a missing argument


# What SLURM's commands do in a job of two nodes, if both nodes are this machine. Two Ray nodes of one machine need
# different ports.
SCONTROL = "#!/bin/sh\nprintf '127.0.0.1\\n127.0.0.2\\n'\n"
SRUN = """#!/bin/sh
while case $1 in -*) true ;; *) false ;; esac; do shift; done
exec "$@" --num-cpus=1 --node-ip-address=127.0.0.1 --dashboard-agent-listen-port=0 --metrics-export-port=0 \\
    --disable-usage-stats
"""
SAVE_AT_SIGTERM = """
import os, ray, signal, time
ray.init(log_to_driver=False)
while len([node for node in ray.nodes() if node["Alive"]]) < 2:
    time.sleep(0.2)
print("both nodes joined", flush=True)
def save(*_):
    time.sleep(2)
    print("saved", flush=True)
    raise SystemExit(3)
signal.signal(signal.SIGTERM, save)
os.kill(os.getppid(), signal.SIGTERM)  # as SLURM does before the end of the job's time
time.sleep(100)
"""


@pytest.fixture(scope="module")
def slurm_job(environment, tmp_path_factory):
    """Exit code and output of a job for SLURM."""
    scripts = tmp_path_factory.mktemp("slurm")
    for name, script in (("scontrol", SCONTROL), ("srun", SRUN)):
        (scripts / name).write_text(script)
        (scripts / name).chmod(0o755)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray-")  # the paths of Ray's sockets in this folder must be short
    variables = {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "RAY_PORT": str(port),
        "RAY_TMPDIR": folder,
        "PATH": os.pathsep.join([str(scripts), str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    log = scripts / "log"
    try:
        with started(["bash", str(SLURM), sys.executable, "-c", SAVE_AT_SIGTERM], log, environment | variables) as job:
            wait_until(lambda: job.poll() is not None, job, log, idle_s=120)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return job.returncode, log.read_text()


# A job whose nodes need not start Ray: `ray` and the command print what they are given. The command ends when all nodes
# have printed theirs.
PRINT = """#!/bin/sh
echo "$(basename "$0") $*" | tee -a "$PRINTED"
case "$0 $*" in
*--block*) exec sleep 100 ;;
*/pretrain*) until [ "$(grep -c "^srun" "$PRINTED")" = "$NUM_STARTS" ]; do sleep 0.1; done ;;
esac
"""


@pytest.mark.parametrize(
    ("variables", "arguments", "command"),
    [
        ({}, (), "pretrain --hardware gpu:1x8 --wait-for-resources-s 300"),
        (
            {"SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "4", "NODE_WAIT_S": "60"},
            ("--preset", "gpt2", "--prompts", "a b"),
            "pretrain --hardware gpu:3x4 --wait-for-resources-s 60 --preset gpt2 --prompts a b",
        ),
        ({"SLURM_JOB_NUM_NODES": "2"}, ("pretrain", "--hardware", "gpu:8x2"), "pretrain --hardware gpu:8x2"),
    ],
)
def test_a_job_for_slurm_takes_its_numbers_from_slurm(tmp_path, variables, arguments, command):
    assert subprocess.run(["bash", "-n", str(SLURM)], check=False).returncode == 0
    for name, script in (("scontrol", SCONTROL), ("srun", PRINT), ("ray", PRINT), ("pretrain", PRINT)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    others = int(variables.get("SLURM_JOB_NUM_NODES", "1")) - 1
    environment |= {"PRINTED": str(tmp_path / "printed"), "NUM_STARTS": str(1 + (others > 0))}
    environment |= {"SLURM_JOB_NODELIST": "node[1-3]", "PATH": path} | variables
    job = subprocess.run(
        ["bash", str(SLURM), *arguments], env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert job.returncode == 0
    lines = job.stdout.splitlines()
    assert command in lines
    started = [line for line in lines if line.startswith("srun ")]
    assert len(started) == 1 + (others > 0)
    assert others == 0 or any(f"--nodes={others} --ntasks={others} --exclude=127.0.0.1" in line for line in started)


@pytest.mark.slow
def test_the_nodes_of_a_job_for_slurm_join(slurm_job):
    assert "both nodes joined" in slurm_job[1]


@pytest.mark.slow
def test_a_job_for_slurm_lets_its_command_save_at_the_end_of_its_time(slurm_job):
    code, printed = slurm_job
    assert "saved" in printed
    assert code == 3, printed
