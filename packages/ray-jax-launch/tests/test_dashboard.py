"""Ray's dashboard with a cluster of this machine. It needs `ray[default]`."""

import socket
import urllib.request

import pytest
import ray
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

from ray_jax_launch import LaunchError, connect, dashboard_url
from ray_jax_launch._ray_internals.ray_cluster import connected_node, lacks_dashboard


def test_without_a_cluster_there_is_no_dashboard():
    assert dashboard_url() is None


@pytest.mark.gauges
def test_the_dashboard_answers_at_its_url():
    connect(dashboard=True)
    try:
        url = dashboard_url()
        assert url is not None
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert "Ray Dashboard" in answer.read().decode()
    finally:
        ray.shutdown()


@pytest.mark.gauges
def test_a_cluster_has_no_dashboard_and_no_metrics_unless_asked():
    connect()
    try:
        assert dashboard_url() is None
        (node,) = ray.nodes()
        assert node["MetricsExportPort"] == -1  # Ray's for none
    finally:
        ray.shutdown()


@pytest.mark.gauges
def test_the_agent_of_a_dashboard_does_not_wait_for_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", DEFAULT_DASHBOARD_AGENT_LISTEN_PORT))
        other.listen()
        connect(dashboard=True)
        try:
            node = connected_node()
            assert node is not None
            assert node.dashboard_agent_listen_port not in (None, -1)  # -1 after Ray has tried for 3.5 s
        finally:
            ray.shutdown()


@pytest.mark.skipif(not lacks_dashboard(), reason="the dashboard is installed")
def test_a_dashboard_that_is_not_installed_is_an_error_with_the_remedy():
    with pytest.raises(LaunchError, match=r"Install it: pip install 'ray\[default\]'"):
        connect(dashboard=True)
    assert not ray.is_initialized()
