"""Every test that computes here sees two CPU devices; workers see one. Object storage is a server of this machine."""

import logging
import os

import pytest
import ray
from ray.cluster_utils import Cluster

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"


@pytest.fixture(scope="session")
def s3():
    """The URI of an empty bucket on an S3 server of this machine, which this process's children know as well."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    S3FileSystem(endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True).create_dir("bucket")
    yield "s3://bucket"
    server.stop()


@pytest.fixture(params=["folder", "s3"])
def place(request, tmp_path):
    """A place for checkpoints: a folder, and a URI."""
    if request.param == "folder":
        return tmp_path
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}"


@pytest.fixture(scope="module")
def cluster(s3):
    """A Ray cluster on this machine, of four logical CPUs. Other modules make their own."""
    from ray_jax_launch import connect, cpu

    # The workers inherit the environment of the cluster; theirs is to have one device each.
    flags = os.environ.pop("XLA_FLAGS")
    connect(cpu(2))
    os.environ["XLA_FLAGS"] = flags
    yield
    ray.shutdown()


@pytest.fixture
def nodes():
    """A cluster whose head has no CPUs, and nodes of one CPU each that are added to it."""
    flags = os.environ.pop("XLA_FLAGS", None)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    if flags is not None:
        os.environ["XLA_FLAGS"] = flags
