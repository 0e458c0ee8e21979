"""The user's cache: closed to other users, and not used if it is theirs."""

import logging
import os
import platform
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from pretrain import main
from pretrain._data import cache_folder
from pretrain._errors import UsageError
from pretrain._run.folder import locate
from pretrain._run.remote_copy import reader_copy
from pretrain._surroundings.private_cache import private_cache
from pretrain._training import process
from pretrain._training.process import keep_programs

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache with folders of ours that were open to all users."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("pretrain", "owt-data"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.fixture
def programs():
    """The folder of compiled programs, as jax has it."""
    names = (
        "jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs"
    )  # fmt: skip
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield lambda: jax.config.values["jax_compilation_cache_dir"]
    for name, value in before.items():
        jax.config.update(name, value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_compiled_programs_are_closed_to_other_users(cache, programs):
    keep_programs()
    assert Path(programs()).is_relative_to(cache / "pretrain")
    assert mode(cache / "pretrain") == 0o700


def test_compiled_programs_are_kept_up_to_a_limit(cache, programs, monkeypatch):
    """The least recently used ones are deleted."""
    monkeypatch.setattr(process, "_MAX_BYTES", 20_000)
    monkeypatch.setattr(process, "_MIN_COMPILE_S", 0.0)
    keep_programs()
    reset_cache()  # jax has opened another folder
    sizes = []
    for number in range(12):
        jax.jit(lambda x, number=number: jnp.sin(x * number))(jnp.ones(8)).block_until_ready()
        sizes.append(sum(path.stat().st_size for path in Path(programs()).rglob("*")))
    reset_cache()
    assert max(sizes) <= 20_000
    assert sizes[0] > 1000


@pytest.mark.parametrize(
    ("num_processes", "backend", "is_kept"), [(1, "gpu", True), (2, "gpu", False), (2, "tpu", False), (2, "cpu", True)]
)
def test_processes_that_share_a_compilation_keep_no_programs(
    num_processes, backend, is_kept, cache, programs, monkeypatch
):
    monkeypatch.setattr(jax, "process_count", lambda: num_processes)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    keep_programs()
    assert (programs() is not None) == is_kept


def test_hosts_with_one_home_folder_have_their_own_programs(cache, programs, monkeypatch):
    folders = set()
    for host in ("first", "second"):
        monkeypatch.setattr(platform, "node", lambda host=host: host)
        jax.config.update("jax_compilation_cache_dir", None)
        keep_programs()
        folders.add(programs())
    assert len(folders) == 2


def test_a_cache_of_programs_that_the_user_names_is_used(cache, programs, tmp_path):
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "named"))
    keep_programs()
    assert programs() == str(tmp_path / "named")
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == process._MIN_COMPILE_S


def test_a_limit_of_the_user_is_kept(cache, programs, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "5")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5)
    keep_programs()
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 5


@pytest.mark.parametrize("before", [0o750, 0o770, 0o705, 0o701])
def test_a_cache_that_is_open_to_some_is_closed(before, cache):
    (cache / "owt-data").chmod(before)
    assert mode(private_cache("owt-data")) == 0o700


@pytest.mark.parametrize("locates", [locate, reader_copy])
def test_copies_of_runs_are_closed_to_other_users(locates, cache):
    assert locates("s3://bucket/runs/first").path.is_relative_to(cache / "pretrain")
    assert mode(cache / "pretrain") == 0o700


def test_prepared_tokens_are_closed_to_other_users(cache):
    assert cache_folder() == cache / "owt-data"
    assert mode(cache / "owt-data") == 0o700


def test_a_missing_cache_is_made_closed(cache):
    assert mode(private_cache("new")) == 0o700


def test_relative_folders_of_xdg_are_ignored(monkeypatch):
    names = ("XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    for name in names:
        monkeypatch.setenv(name, "relative")
    assert main(["--version"]) == 0
    assert not set(names) & os.environ.keys()  # matplotlib and datasets read them


@as_root
@pytest.mark.parametrize("is_link", [False, True])
def test_a_cache_of_another_user_is_not_used(is_link, cache, programs, caplog):
    folder = cache / "pretrain"
    if is_link:
        folder.rmdir()
        (cache / "own").mkdir()
        folder.symlink_to("own")
    os.chown(folder, 12345, 12345, follow_symlinks=False)
    with caplog.at_level(logging.WARNING, "pretrain"):
        keep_programs()
    assert programs() is None
    (message,) = caplog.messages
    assert message == (
        f"compiled programs are not kept: {folder} must be a folder of this user, got one of user 12345. Set "
        "XDG_CACHE_HOME to another."
    )
    with pytest.raises(UsageError, match="must be a folder of this user, got one of user 12345"):
        locate("s3://bucket/runs/first")


@as_root
@pytest.mark.parametrize("is_link", [False, True])
def test_programs_are_not_kept_in_a_folder_of_another_user(is_link, cache, programs, caplog):
    folder, theirs = cache / "pretrain/programs", cache / "theirs"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    if is_link:
        folder.symlink_to(theirs)
    else:
        theirs.rename(folder)
    with caplog.at_level(logging.WARNING, "pretrain"):
        keep_programs()
    assert programs() is None
    assert f"{folder} must be a folder of this user, got one of user 12345." in caplog.text
    assert [path.name for path in folder.iterdir()] == []
