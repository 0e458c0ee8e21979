"""Ray's dashboard with a cluster of this machine. It needs `ray[default]`."""

import urllib.request

import pytest
import ray

from ray_jax_launch import LaunchError, connect, dashboard_url
from ray_jax_launch._ray_internals.ray_cluster import lacks_dashboard


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
def test_a_cluster_has_no_dashboard_unless_asked():
    connect()
    try:
        assert dashboard_url() is None
    finally:
        ray.shutdown()


@pytest.mark.skipif(not lacks_dashboard(), reason="the dashboard is installed")
def test_a_dashboard_that_is_not_installed_is_an_error_with_the_remedy():
    with pytest.raises(LaunchError, match=r"Install it: pip install 'ray\[default\]'"):
        connect(dashboard=True)
    assert not ray.is_initialized()
