"""The checks and builds of this repository. `nox -s tests` runs all tests; `nox -l` lists every session."""

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urljoin

import nox

nox.options.default_venv_backend = "uv"
nox.options.sessions = ["tests", "lint", "types", "imports"]
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
MEMBERS = {
    "owt-data": "packages/owt-data",
    "nnx-gpt2": "packages/nnx-gpt2",
    "ray-jax-launch": "packages/ray-jax-launch",
    "pretrain": "apps/pretrain",
}
INTEGRATION = "integration"
PARTS = [*MEMBERS, INTEGRATION]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
REQUIREMENTS = ROOT / "deploy" / "requirements.txt"
ACCELERATORS = ["cuda12", "cuda13", "tpu"]
# What an extra brings.
MODULES = {
    "cluster": "aiohttp_cors", "eval": "lm_eval", "hub": "huggingface_hub", "trackio": "trackio", "wandb": "wandb",
}  # fmt: skip
FAULTS = ROOT / "benchmarks" / "results" / "faults.md"

# JAX uses the CPU, even where there is an accelerator. Ray's workers use the session's environment, not `uv run`.
# Python may store compiled modules. Otherwise each of Ray's processes would compile its imports for several seconds.
TEST_ENV: dict[str, str | None] = {
    "JAX_PLATFORMS": "cpu",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PYTHONDONTWRITEBYTECODE": None,
    # One process more than there are cores: many tests wait for processes that they start.
    "PYTEST_XDIST_AUTO_NUM_WORKERS": str((os.cpu_count() or 1) + 1),
}
# pytest-xdist starts no processes of its own: tests with time limits, and tests that measure, need the machine alone.
ONE_PROCESS = {"PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
# The slow tests may take longer than the limit of ten minutes in `pyproject.toml`.
LONG_LIMIT = ("-o", "faulthandler_timeout=3600")
# Folders for the tests marked `shared_data`: the ranks of the gpt2 tokenizer, and two small corpora.
SHARED_DATA = {"TIKTOKEN_CACHE_DIR": "the files of tiktoken's gpt2", "OWT_DATA_CORPORA": "the corpora"}


def each(parts: list[str]) -> Callable[[Any], Any]:
    """Make one session per part, named `session(part)`."""
    return nox.parametrize("part", parts, ids=parts)


def sync(session: nox.Session, *options: str) -> None:
    """Install exactly the locked packages that these options of `uv sync` select."""
    session.run_install(
        "uv", "sync", "--quiet", "--exact", *options,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
        external=True,
    )  # fmt: skip


def sync_part(session: nox.Session, part: str, *options: str) -> None:
    """Install one package with only its own dependencies, or everything for the integration tests."""
    sync(session, *(["--group", "test"] if part == INTEGRATION else ["--package", part]), *options)


def test_folder(part: str) -> str:
    """Return the folder of a part's tests."""
    return "tests" if part == INTEGRATION else f"{MEMBERS[part]}/tests"


def run_tests(session: nox.Session, part: str, *options: str) -> None:
    """Run a part's tests, and the examples in the docstrings of a package."""
    # A module that needs an extra has no examples.
    doctests = ["--doctest-modules", "--doctest-ignore-import-errors"]
    sources = [] if part == INTEGRATION else [f"{MEMBERS[part]}/src", *doctests]
    session.run("pytest", test_folder(part), *sources, *options, *session.posargs, env=TEST_ENV)


@nox.session
@each(PARTS)
def tests(session: nox.Session, part: str) -> None:
    """Run the tests of each package in its own environment, then the integration tests."""
    sync_part(session, part)
    run_tests(session, part)


@nox.session
@each(PARTS)
def slow(session: nox.Session, part: str) -> None:
    """Run the slow tests, which `tests` leaves out."""
    sync_part(session, part, *(["--extra", "eval"] if part == "pretrain" else []))
    env = TEST_ENV | ({} if part in ("owt-data", "nnx-gpt2") else ONE_PROCESS)
    session.run("pytest", test_folder(part), "-m", "slow", *LONG_LIMIT, *session.posargs, env=env)


@nox.session
def faults(session: nox.Session) -> None:
    """Run every fault test and write the table of faults to benchmarks/results/faults.md."""
    # session.create_tmp would set TMPDIR, and Ray's workers do not start with their sockets in that folder.
    reports = Path(tempfile.mkdtemp(prefix="faults-"))
    for part in PARTS:
        sync_part(session, part, *(["--group", "trackers"] if part == "pretrain" else []))
        session.run(
            "pytest", test_folder(part), "-m", "fault", *LONG_LIMIT,
            "-o", "junit_family=xunit1", f"--junitxml={reports / part}.xml", *session.posargs,
            env=TEST_ENV | ONE_PROCESS,
            success_codes=[0, 1, 5],  # the table reports failed tests, and a part may have no fault test
        )  # fmt: skip
    out = [] if session.posargs else ["--out", str(FAULTS)]  # a selection of the tests is not the table
    session.run("python", "tests/fault_table.py", *out, *(f"{reports / part}.xml" for part in PARTS))


@nox.session
@each(list(MEMBERS))
def mutants(session: nox.Session, part: str) -> None:
    """Change the code in a small way, thousands of times, and count the changes that the tests notice."""
    sync(session, "--all-packages", "--group", "test")
    folder = ROOT / MEMBERS[part]
    session.chdir(folder)
    # The processes that a test starts import the changed package too. Python forgets a folder that does not exist yet.
    source = folder / "mutants" / "src"
    source.mkdir(parents=True, exist_ok=True)
    session.run("mutmut", "run", *session.posargs, env=TEST_ENV | {"PYTHONPATH": str(source)})
    session.run("python", str(ROOT / "tests" / "mutation_score.py"), ".")


@nox.session
@each(["owt-data", "pretrain"])
def shared_data(session: nox.Session, part: str) -> None:
    """Run the tests that need the real gpt2 tokenizer or real corpora."""
    for variable, content in SHARED_DATA.items():
        if not Path(os.environ.get(variable, "")).is_absolute():
            session.error(f"{variable} must be the absolute path of a folder with {content}. Set {variable}.")
    sync_part(session, part)
    session.run("pytest", test_folder(part), "-m", "shared_data", *session.posargs, env=TEST_ENV)


@nox.session
def bench(session: nox.Session) -> None:
    """Run every benchmark in a short form, and print the ratios beside their goals."""
    sync(session, "--group", "test")
    session.run("python", "benchmarks/bench.py", *session.posargs, env={"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"})


@nox.session
def browser(session: nox.Session) -> None:
    """Open the page of the command `report` in Chromium, if it is installed."""
    sync_part(session, "pretrain")
    session.run(
        "pytest", f"{test_folder('pretrain')}/report", "-m", "browser", *session.posargs, env=TEST_ENV | ONE_PROCESS
    )


@nox.session
@each(["tpu", "gpu"])
def accelerators(session: nox.Session, part: str) -> None:
    """Compile the steps for devices that are not here, by the devices' own compilers."""
    for package in ("nnx-gpt2", "pretrain"):
        sync_part(session, package, "--extra", {"tpu": "tpu", "gpu": "cuda12"}[part])
        folder = test_folder(package)
        session.run("pytest", folder, "-m", "accelerators", *LONG_LIMIT, *session.posargs, env=TEST_ENV | ONE_PROCESS)


@nox.session
def gauges(session: nox.Session) -> None:
    """Test that Ray's metrics show what a training loop logs."""
    sync(session, "--package", "ray-jax-launch", "--group", "gauges")
    session.run("pytest", test_folder("ray-jax-launch"), "-m", "gauges", *session.posargs, env=TEST_ENV | ONE_PROCESS)


@nox.session
def trackers(session: nox.Session) -> None:
    """Test wandb, trackio and the server of TensorBoard, without a network."""
    sync_part(session, "pretrain", "--group", "trackers")
    session.run("pytest", test_folder("pretrain"), "-m", "trackers", *session.posargs, env=TEST_ENV)


@nox.session(python="3.11")
@each(PARTS)
def lowest(session: nox.Session, part: str) -> None:
    """Run all tests with the lowest versions of the direct dependencies."""
    # `uv pip` does not touch uv.lock, which `uv sync --resolution lowest-direct` would overwrite.
    project = MEMBERS.get(part, MEMBERS["pretrain"])
    groups = ["pyproject.toml:dev", "pyproject.toml:test"] if part == INTEGRATION else [f"{project}/pyproject.toml:dev"]
    session.run_install(
        "uv", "pip", "install", "--quiet", "--resolution", "lowest-direct", "--editable", project,
        *(f"--group={group}" for group in groups),
        external=True,
    )  # fmt: skip
    # Old versions use functions that their newer dependencies call deprecated.
    run_tests(session, part, "-W", "ignore::DeprecationWarning")


@nox.session(python="3.13")
@each(PARTS)
def newest(session: nox.Session, part: str) -> None:
    """Run all tests on the newest supported Python."""
    sync_part(session, part)
    run_tests(session, part)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into the folder site, without a network."""
    sync(session, "--all-packages", "--group", "docs")
    command = session.posargs or ["build"]
    session.run("mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu"})


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, spelling and words."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("python", "tests/check_words.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, on Linux and on macOS."""
    sync(session, "--group", "types", "--group", "test", "--group", "trackers", "--all-packages")
    session.run("pyright", "--version")  # the first call installs it
    # Python's types name the functions that macOS lacks. Benchmarks run on Linux alone.
    runs = [("Linux",), ("Darwin", "packages", "apps", "tests", "noxfile.py")]
    with ThreadPoolExecutor() as pool:  # pyright takes one core
        list(pool.map(lambda options: session.run("pyright", "--pythonplatform", *options), runs))


@nox.session
def imports(session: nox.Session) -> None:
    """Check the imports between the packages."""
    sync(session, "--group", "imports")
    session.run("lint-imports")


@nox.session
def build(session: nox.Session) -> None:
    """Build every package as for a release, check the files, and run the README of nnx-gpt2 from its wheel."""
    session.install("twine>=6")
    build_files(session, [*MEMBERS])
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
    """Regenerate the requirements in `deploy`, and fail if they were out of date."""
    base = requirements(session)
    texts = {REQUIREMENTS: base}
    for name in ACCELERATORS:
        texts[REQUIREMENTS.with_stem(f"requirements-{name}")] = [
            block for block in requirements(session, "--extra", name) if block not in base
        ]
    stale = [path for path, blocks in texts.items() if not path.exists() or path.read_text() != "".join(blocks)]
    for path in stale:
        path.write_text("".join(texts[path]))
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        session.error(f"{names} were out of date; they are regenerated, commit them")


def requirements(session: nox.Session, *extras: str) -> list[str]:
    """Return the locked packages of the application for a cluster, each with its hashes."""
    text = session.run(
        "uv", "export", "--quiet", "--package", "pretrain", "--extra", "cluster", *extras, "--no-dev",
        "--no-emit-workspace", "--no-header", "--no-annotate",
        external=True, silent=True, log=False,
    )  # fmt: skip
    return re.findall(r"^\S.*\n(?:\s+.*\n)*", str(text), re.M)


@nox.session(python=re.findall(r"^FROM python:([\d.]+)", DOCKERFILE.read_text(), re.M)[0], venv_params=["--seed"])
def image(session: nox.Session) -> None:
    """Build the image and train in it, or run its steps in a new environment where Docker does not run."""
    accelerator = " ".join(session.posargs)
    train = ["pretrain", "--hardware", "cpu:1", "--train.max-steps", "20"]
    if shutil.which("docker") and subprocess.run(["docker", "info"], capture_output=True).returncode == 0:
        argument, tag = f"ACCELERATOR={accelerator}", "gpt2-on-ray:test"
        session.run("docker", "build", "-f", DOCKERFILE, "--build-arg", argument, "-t", tag, ROOT, external=True)
        session.run("docker", "run", "--rm", "--shm-size=2g", tag, *train, external=True)
        return
    environment = TEST_ENV | {"ACCELERATOR": accelerator}
    with tempfile.TemporaryDirectory() as folder:
        steps = DOCKERFILE.read_text().replace("\\\n", " ").replace("/build", f"{folder}/build")
        for instruction, rest in re.findall(r"^(COPY|RUN) (.*)", steps, re.M):
            if instruction == "COPY":
                pattern, target = rest.split()
                Path(target).mkdir(parents=True, exist_ok=True)
                for path in ROOT.glob(pattern):
                    shutil.copytree(path, target, dirs_exist_ok=True) if path.is_dir() else shutil.copy(path, target)
            elif rest.startswith("pip "):
                session.run("sh", "-ec", rest, env=environment, external=True)
        with session.chdir(folder):
            session.run(*train, env=environment)


@nox.session
def release(session: nox.Session) -> None:
    """Build the package of a tag, such as nnx-gpt2-v0.2.0, or rehearse the release of all packages."""
    session.install("twine>=6")
    if session.posargs:
        build_files(session, [tagged_package(session, " ".join(session.posargs))])
    else:
        build_files(session, [*MEMBERS])
        rehearse(session)


def tagged_package(session: nox.Session, tag: str) -> str:
    """Return the name of the package of a tag, whose version and changelog must be those of the tag."""
    name, _, tagged = tag.rpartition("-v")
    if name not in MEMBERS:
        names = ", ".join(MEMBERS)
        session.error(f"the tag must be one of {names}, then -vVERSION, got {session.posargs}. Give it after --")
    folder = ROOT / MEMBERS[name]
    declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]
    if tagged != declared:
        session.error(f"the tag's version must be {declared}, as in pyproject.toml, got {tagged}. Correct the tag")
    changes = (folder / "CHANGELOG.md").read_text()
    if f"\n## [{declared}] - " not in changes or "\n## [Unreleased]" in changes:
        session.error(f"the changelog of {name} must name all changes under {declared}. Rename its section Unreleased")
    if repository().startswith("https://example.org/"):
        session.error("the address of the repository is a placeholder; set `repository` in pyproject.toml")
    return name


def repository() -> str:
    """Return the address of the repository."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["release"]["repository"]


def build_files(session: nox.Session, names: list[str]) -> None:
    """Build wheels and source files into dist, with links that work on the package index, and check them."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for name in names:
        address = f"{repository()}/blob/main/{MEMBERS[name]}"
        with tempfile.TemporaryDirectory() as folder:
            staged = Path(folder) / name
            shutil.copytree(ROOT / MEMBERS[name], staged, ignore=shutil.ignore_patterns("tests", "__pycache__"))
            readme = staged / "README.md"
            install = f"```\npip install {name}\n```"
            text = re.sub(r"<!-- before the first release -->.*?<!-- end -->", install, readme.read_text(), flags=re.S)
            if "REPOSITORY" in text:
                session.error(f"the README of {name} names REPOSITORY outside the part before the first release")
            readme.write_text(absolute_links(text, address))
            urls = {"Repository": repository(), "Changelog": f"{address}/CHANGELOG.md"}
            with (staged / "pyproject.toml").open("a") as project:
                project.write("\n[project.urls]\n" + "".join(f'{key} = "{url}"\n' for key, url in urls.items()))
            session.run_install("uv", "build", "--quiet", "--out-dir", str(ROOT / "dist"), str(staged), external=True)
    files = sorted(map(str, [*(ROOT / "dist").glob("*.whl"), *(ROOT / "dist").glob("*.tar.gz")]))
    session.run("twine", "check", "--strict", *files)
    for file in files:
        if not any(PurePosixPath(member).name == "LICENSE" for member in members_of(file)):
            session.error(f"{file} has no licence")


def absolute_links(text: str, address: str) -> str:
    """Return Markdown whose links to files are addresses; `address` is that of the file's folder."""
    return re.sub(r"\]\((?![a-z]+:|#)([^)]+)\)", lambda match: f"]({urljoin(address + '/', match[1])})", text)


def members_of(archive: str) -> list[str]:
    """Return the names of the files in a wheel or a source file."""
    if archive.endswith(".whl"):
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as source:
        return source.getnames()


def rehearse(session: nox.Session) -> None:
    """Install the built packages in a new environment, away from this clone, and train the quickstart with them."""
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        install_built(session, "pretrain")
        session.run("new/bin/pretrain", "--hardware", "local", external=True, env=TEST_ENV)
        session.run("new/bin/pretrain", "sample", "quickstart-builtin", external=True, env=TEST_ENV)
        session.run("new/bin/owt-data", "--help", external=True, silent=True)
        for name in MEMBERS:
            run_readme(session, name)


def install_built(session: nox.Session, package: str, *options: str) -> None:
    """Install a package of `dist` in the environment `new` of the working folder."""
    session.run_install("uv", "venv", "--quiet", "--allow-existing", "new", external=True)
    found = ("--python", "new", "--find-links", str(ROOT / "dist"))
    session.run_install("uv", "pip", "install", "--quiet", *found, *options, package, external=True)


def run_readme(session: nox.Session, name: str) -> None:
    """Run the Python examples of a package's README with the environment `new`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / MEMBERS[name] / "README.md").read_text(), re.S)
    Path(f"example-{name}.py").write_text("\n".join(blocks))  # not the name of a module
    session.run("new/bin/python", f"example-{name}.py", external=True, env=TEST_ENV)


@nox.session
@each([*MEMBERS])
def wheels(session: nox.Session, part: str) -> None:
    """Install a wheel and its extras in an empty environment, with the lowest and the newest dependencies."""
    session.install("twine>=6")
    build_files(session, [*MEMBERS])
    project = tomllib.loads((ROOT / MEMBERS[part] / "pyproject.toml").read_text())["project"]
    for resolution in ("lowest-direct", "highest"):
        with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
            install_built(session, part, "--resolution", resolution)
            run_readme(session, part)
            for extra in project.get("optional-dependencies", {}):
                # A CUDA library alone has gigabytes: its versions are resolved, not installed.
                dry = ["--dry-run"] if extra in ACCELERATORS else []
                install_built(session, f"{part}[{extra}]", "--resolution", resolution, *dry)
                if extra in MODULES:
                    session.run("new/bin/python", "-c", f"import {MODULES[extra]}", external=True, env=TEST_ENV)


@nox.session
@each(PARTS)
def upgraded(session: nox.Session, part: str) -> None:
    """Run all tests with the newest versions of the dependencies, without the limit on their dates."""
    sync_part(session, part)
    now = datetime.now(UTC).isoformat()
    project = MEMBERS.get(part, MEMBERS["pretrain"])
    session.run_install("uv", "pip", "install", "--quiet", "--upgrade", "--exclude-newer", now, project, external=True)
    run_tests(session, part, "-W", "ignore::DeprecationWarning")


@nox.session
def newest_ray(session: nox.Session) -> None:
    """Run the tests that use Ray with the newest Ray, and raise the upper bound if they pass."""
    sync(session, "--all-packages", "--group", "test")
    now = datetime.now(UTC).isoformat()
    session.run_install("uv", "pip", "install", "--quiet", "--upgrade", "--exclude-newer", now, "ray", external=True)
    for part in ("ray-jax-launch", "owt-data", INTEGRATION):
        session.run("pytest", test_folder(part), *session.posargs, env=TEST_ENV)
    found = session.run("python", "-c", "import ray; print(ray.__version__)", silent=True, log=False)
    major, minor, *_ = str(found).strip().split(".")
    for folder in MEMBERS.values():
        path = ROOT / folder / "pyproject.toml"
        path.write_text(re.sub(r'(ray\[[^"]+,<)\d+\.\d+"', rf'\g<1>{major}.{int(minor) + 1}"', path.read_text()))
