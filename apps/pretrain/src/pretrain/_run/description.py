"""The description of a run: `config.json`, and its copy in each checkpoint."""

import contextlib
import dataclasses
import json
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

from owt_data import WINDOW_ORDER_VERSION, MixtureWeight, PrepareOptions, TokenData, TokenizerName
from pretrain._config import LENGTHS, PrepareConfig, PretrainConfig
from pretrain._errors import UsageError, short, shown
from pretrain._run.differences import changes_result, option_values
from pretrain._run.files import check_kind, flatten, parse_json, write_json
from pretrain._run.folder import RunFolder
from ray_jax_launch import StoragePath, as_storage_path, join_path, newest_metadata

RUN = "run"
"""The key of the description in a checkpoint's metadata."""

FORMAT = 1
"""The format of descriptions that this version writes, and the only one that it reads."""

_REMEDY = "Restore it from a copy, or choose another --name for a new run."
_REMEDY_OF_VERSION = "Use that version for this run, or choose another --name for a new run."
# Settings with a check of their own: that of the tokens, by their digests, and `check_length`.
_CHECKED_APART = {"data", *LENGTHS, *(f"prepare.{field.name}" for field in dataclasses.fields(PrepareConfig))}
_PACKAGES = (
    "pretrain", "nnx-gpt2", "owt-data", "ray-jax-launch", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ray",
    "numpy",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class DataDescription:
    """The tokens of a run."""

    tokens: str | list[str] | dict[str, MixtureWeight]
    """Names of the token files, for `open_tokens`."""

    tokenizer: str
    """Name of the tokenizer; for one of a file, the path of the file."""

    fingerprint: dict[str, Any]
    """Equal for equal tokens: see `TokenData.fingerprint`."""

    window_order_version: int = WINDOW_ORDER_VERSION
    """Version of the window order."""

    @property
    def tokenizer_kind(self) -> str:
        """The name of the tokenizer, without the place of a file. The fingerprint tells files apart."""
        return self.tokenizer if self.tokenizer in get_args(TokenizerName) else "tokenizer.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The checkpoint, or the published weights, that a run starts from."""

    place: str
    """Folder or URI of a run, or the name or folder of published weights."""

    step: int | None
    """Step of the run's checkpoint; None for published weights."""

    tokenizer: str | None
    """Tokenizer of the run, or of the published weights; None if their files do not tell."""

    weights_only: bool
    """True if the run takes the weights, and is at step 0 with a new optimizer; False if it takes everything."""

    def __str__(self) -> str:
        """Return the origin as a text."""
        checkpoint = self.place if self.step is None else f"{self.place}@{self.step}"
        return f"{'the weights' if self.weights_only else 'everything'} of {checkpoint}"

    @property
    def start_step(self) -> int:
        """The step that the run starts at."""
        return 0 if self.weights_only or self.step is None else self.step

    @property
    def checkpoints(self) -> StoragePath:
        """The folder or URI of the checkpoints of the run."""
        return join_path(as_storage_path(self.place), "checkpoints")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDescription:
    """The configuration, the data, the hardware and the versions of a run."""

    config: PretrainConfig
    """The resolved configuration of the last start."""

    data: DataDescription
    """The tokens."""

    hardware: str
    """The hardware of the first start; `auto` is resolved."""

    versions: dict[str, str]
    """Versions of Python and of the packages at the first start."""

    commit: str | None = None
    """Commit of the source code at the first start, with `-dirty` if files differed; None without git."""

    origin: Origin | None = None
    """The start of a run that does not start from random weights."""

    format: int = FORMAT
    """Number of the format. It is raised when a field is added, removed, or gets another meaning."""

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return dataclasses.asdict(self)


def describe(
    config: PretrainConfig, data: DataDescription, hardware: str, origin: Origin | None = None
) -> RunDescription:
    """Describe a new run."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
    return RunDescription(
        config=config, data=data, hardware=hardware, versions=versions, commit=_commit(), origin=origin
    )


def _commit() -> str | None:
    """Return the commit of the checkout that this file is in."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):  # no git, or no checkout
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        folder = Path(__file__).parent
        tracked = ["git", "ls-files", "--error-unmatch", __file__]  # not a package in another project's checkout
        subprocess.run(tracked, cwd=folder, capture_output=True, check=True, timeout=10)
        found = subprocess.run(command, cwd=folder, capture_output=True, check=True, timeout=10, text=True)
        return found.stdout.strip()
    return None


def describe_data(data: TokenData, data_mode: Literal["prepared", "stream"] = "prepared") -> DataDescription:
    """Describe the tokens of a run. Tokens of a stream are known by their source, because their end is unknown."""
    fingerprint = data.source_fingerprint if data_mode == "stream" else data.fingerprint
    assert fingerprint is not None, "a stream is prepared"
    return DataDescription(
        tokens=data.names,
        tokenizer=data.tokenizer,
        fingerprint=fingerprint,
        window_order_version=WINDOW_ORDER_VERSION,
    )


def read_description(folder: RunFolder) -> RunDescription | None:
    """Read the description of a run. Return None if no run was started.

    The copy in the newest checkpoint is read; before the first checkpoint, `config.json`. Both must have this format.

    Raises:
        UsageError: the description is damaged, or another version of the application wrote it.
    """
    metadata = newest_metadata(folder.checkpoints)
    if metadata is not None:
        if folder.config.is_file():  # a damaged one is written again, but not one of a newer version
            _check_format(folder.config.read_bytes(), folder.config)
        place = f"the description in the newest checkpoint of {folder}"
        return parse_description(json.dumps(metadata.get(RUN)), place)
    if not folder.config.exists():
        return None
    check_kind(folder.config)
    return parse_description(folder.config.read_bytes(), folder.config)


def parse_description(text: str | bytes, place: object, remedy: str | None = None) -> RunDescription:
    """Parse the JSON of a description of this format.

    Args:
        text: the JSON.
        place: the JSON's file or place, for the error.
        remedy: the last sentence of the error, for a text that is not that of a run to continue.

    Raises:
        UsageError: the text is no such JSON, or has another format or other fields: another version wrote it.
    """
    content = _check_format(text, place, remedy)
    description = parse_json(RunDescription, text, place, remedy or _REMEDY)
    if content is not None and (name := _first_difference(content, json.loads(json.dumps(description.to_json())))):
        found = f"a difference, {short(name)}, {_writer(content)}"
        raise _of_another_version(place, "have the fields of this format", found, remedy)
    return description


def _check_format(text: str | bytes, place: object, remedy: str | None = None) -> dict[str, Any] | None:
    """Return the object of a description of this format; None for another text, which `parse_json` rejects.

    Raises:
        UsageError: the object has another format.
    """
    content: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        content = json.loads(text)
    if not isinstance(content, dict) or "config" not in content:
        return None
    if not (type(content.get("format")) is int and content["format"] == FORMAT):
        found = f"{shown(content.get('format'))}, {_writer(content)}"
        raise _of_another_version(place, f"have format {FORMAT}", found, remedy)
    return content


def _of_another_version(place: object, constraint: str, found: str, remedy: str | None) -> UsageError:
    return UsageError(
        f"{place} must {constraint}, which pretrain {version('pretrain')} reads, got {found}. "
        f"{remedy or _REMEDY_OF_VERSION}"
    )


def _writer(content: dict[str, Any]) -> str:
    versions = content.get("versions")
    writer = versions.get("pretrain") if isinstance(versions, dict) else None
    return "of an unknown version" if writer is None else f"from pretrain {short(str(writer))}"


def _first_difference(found: dict[str, Any], expected: dict[str, Any], section: str = "") -> str | None:
    """Return the name of the first field that only one of two objects has."""
    for name in {**found, **expected}:
        if name not in found or name not in expected:
            return f"{section}{name}"
        if isinstance(found[name], dict) and isinstance(expected[name], dict):
            inner = _first_difference(found[name], expected[name], f"{section}{name}.")
            if inner is not None:
                return inner
    return None


def write_description(folder: RunFolder, description: RunDescription) -> None:
    """Write `config.json`, unless it already holds this description."""
    with contextlib.suppress(FileNotFoundError, UsageError):
        check_kind(folder.config)
        if parse_description(folder.config.read_bytes(), folder.config) == description:
            return
    write_json(folder.config, description.to_json())


def check_same_settings(stored: RunDescription, config: PretrainConfig, folder: RunFolder) -> None:
    """Reject settings that would change the result of a continued run.

    Raises:
        UsageError: a setting differs; the message names it.
    """
    former, given = stored.config.from_checkpoint, config.from_checkpoint
    if former != given:
        raise UsageError(
            f"--from must be {former or 'absent'}, as at the start of the run in {folder}, got {given or 'none'}. Give "
            "the former --from to continue the run, or another --name for a new run."
        )
    before = {
        name: value
        for name, value in option_values(stored.config).items()
        if changes_result(name) and name not in _CHECKED_APART
    }
    _check_equal(before, option_values(config), folder, "settings")


def check_same_source(stored: RunDescription, sha256: str, options: PrepareOptions, folder: RunFolder) -> None:
    """Reject another text than that of a finished stream, or other options of its preparation.

    Args:
        stored: the description of the run.
        sha256: digest of the text.
        options: options of its preparation.
        folder: the run's folder.

    Raises:
        UsageError: the text or an option differs; the message names it.
    """
    before = {name: stored.data.fingerprint.get(name) for name in ("source_sha256", "options")}
    _check_equal(flatten(before), flatten({"source_sha256": sha256, "options": options.record()}), folder, "--data")


def check_same_data(stored: RunDescription, data: DataDescription, folder: RunFolder) -> None:
    """Reject tokens or a window order other than those of the continued run.

    Raises:
        UsageError: a field differs; the message names it.
    """
    before, now = ({**of.fingerprint, "window_order_version": of.window_order_version} for of in (stored.data, data))
    _check_equal(dict.fromkeys(now) | before, now, folder, "--data")


def _check_equal(before: dict[str, Any], now: dict[str, Any], folder: RunFolder, what: str) -> None:
    for name in sorted(before):
        if before[name] != now.get(name):
            former, found = (shown(value) if value == "" else value for value in (before[name], now.get(name)))
            raise UsageError(
                f"{name} must be {former}, its value at the start of the run in {folder}, got {found}. "
                f"Give the former {what} to continue the run, or another --name for a new run."
            )
