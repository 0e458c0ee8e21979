"""Every check and build by name. `nox -s tests` is the test command; `nox -l` lists the others."""

import re
import shutil
import tempfile
from pathlib import Path

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests", "lint", "types", "imports"]
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
MEMBERS = {
    "owt-data": "packages/owt-data",
    "nnx-gpt2": "packages/nnx-gpt2",
    "ray-jax-launch": "packages/ray-jax-launch",
    "pretrain": "apps/pretrain",
}
REQUIREMENTS = ROOT / "deploy" / "requirements.txt"

# On CPU jax, whatever the machine has; and Ray's workers run in the session's environment, not through uv.
TEST_ENV = {"JAX_PLATFORMS": "cpu", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}


def sync(session: nox.Session, *options: str) -> None:
    """Give the session's environment exactly what the workspace's lock says these options need."""
    session.run_install(
        "uv", "sync", "--quiet", "--exact", *options,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
        external=True,
    )  # fmt: skip


@nox.session
@nox.parametrize("member", list(MEMBERS), ids=list(MEMBERS))
def tests(session: nox.Session, member: str) -> None:
    """Test each member in an environment of its own dependencies alone, then the whole."""
    sync(session, "--package", member)
    folder = MEMBERS[member]
    session.run("pytest", f"{folder}/tests", f"{folder}/src", "--doctest-modules", *session.posargs, env=TEST_ENV)
    session.notify("integration")


@nox.session
def integration(session: nox.Session) -> None:
    """Test what only the whole shows: runs from end to end, faults, boundaries, READMEs."""
    sync(session, "--group", "test")
    session.run("pytest", "tests", *session.posargs, env=TEST_ENV)


@nox.session
@nox.parametrize("member", ["nnx-gpt2", "ray-jax-launch"], ids=["nnx-gpt2", "ray-jax-launch"])
def slow(session: nox.Session, member: str) -> None:
    """Run the tests that take longer, which `tests` leaves out."""
    sync(session, "--package", member)
    alone = ["-n0"] if member == "ray-jax-launch" else []  # its limits of time are for a machine of one's own
    session.run("pytest", f"{MEMBERS[member]}/tests", "-m", "slow", *alone, *session.posargs, env=TEST_ENV)


@nox.session
def gauges(session: nox.Session) -> None:
    """Test that Ray's own metrics show what a loop logs, which takes Ray's dashboard agent."""
    sync(session, "--package", "ray-jax-launch", "--group", "gauges")
    session.run("pytest", f"{MEMBERS['ray-jax-launch']}/tests", "-m", "gauges", "-n0", *session.posargs, env=TEST_ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and spelling."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")


@nox.session
def types(session: nox.Session) -> None:
    """Check types."""
    sync(session, "--group", "types", "--group", "test", "--all-packages")
    session.run("pyright")


@nox.session
def imports(session: nox.Session) -> None:
    """Check who may import whom."""
    sync(session, "--group", "imports")
    session.run("lint-imports")


@nox.session
def build(session: nox.Session) -> None:
    """Build every wheel; install nnx-gpt2's alone and run its README there."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run_install("uv", "build", "--quiet", "--all-packages", "--wheel", "--out-dir", "dist", external=True)
    (wheel,) = (ROOT / "dist").glob("nnx_gpt2-*.whl")
    constraints = Path(session.create_tmp()) / "constraints.txt"
    constraints.write_text(re.sub(r"\s*\\\n\s*--hash=\S+", "", REQUIREMENTS.read_text()))
    session.run_install("uv", "pip", "install", "--quiet", "-c", str(constraints), str(wheel), external=True)
    example = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "packages/nnx-gpt2/README.md").read_text(), re.S))
    absent = "import importlib.util as u; assert not any(map(u.find_spec, ('ray', 'tiktoken', 'datasets')))\n"
    with tempfile.TemporaryDirectory() as empty:
        session.chdir(empty)
        session.run("python", "-c", absent + example, env=TEST_ENV)


@nox.session
def lock(session: nox.Session) -> None:
    """Regenerate deploy/requirements.txt and fail if it was out of date."""
    before = REQUIREMENTS.read_text() if REQUIREMENTS.exists() else ""
    session.run(
        "uv", "export", "--quiet", "--package", "pretrain", "--extra", "cluster", "--no-dev", "--no-emit-workspace",
        "--no-header", "--no-annotate", "--output-file", str(REQUIREMENTS),
        external=True,
    )  # fmt: skip
    if REQUIREMENTS.read_text() != before:
        session.error("deploy/requirements.txt was out of date; it is regenerated, commit it")
