"""The configuration of a run: every option of the command `train`.

The text below a field is the help of its option. A new field makes another format of `config.json`: raise `FORMAT` in
`_run/description.py`. A field whose metadata is `FREE` does not change the result: a continued run may change it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from nnx_gpt2 import GPT2Config, OptimizerConfig
from owt_data import OrderKind, PrepareOptions
from pretrain._errors import UsageError, short, shown
from pretrain._field_types import MAX_FLOAT, MAX_INTEGER, check_fields
from pretrain._suggestions import nearest_option
from pretrain._task_names import parse_tasks
from pretrain._tokenizer_option import check_tokenizer_name
from ray_jax_launch import check_no_credentials, check_run_name, parse_hardware

MAX_STEPS = 2**31 - 1
"""The largest number of steps: a run counts them in 32 bits."""

NUM_SEEDS = MAX_INTEGER + 1
"""The number of seeds."""

MAX_SAMPLE_TOKENS = 1_000_000
"""The largest number of tokens in a sample, which takes hours."""

MAX_COUNT = 2**31 - 1
"""The largest number of windows in a batch: arrays of such shapes are indexed by 32 bits."""

FREE = {"changes_result": False}
"""Metadata of a field that does not change the result of a run, except for rounding."""

LENGTHS = ("train.max_steps", "train.max_epochs", "train.max_tokens")
"""The options of the length of a run. Those after the first replace it."""

MICROBATCHES = ("train.grad_accum_steps", "train.micro_batch_size")
"""The options of the microbatches of a step. The second replaces the first."""

_MAX_WAIT_S = 1e9  # 31 years; a wait of a thread may not take more than 292
# From a microcontroller to a warehouse of machines.
_PEAKS_TFLOPS = 1e-6, 1e9

_STEP_DIGITS = len(str(MAX_STEPS))

TrackerName = Literal["tensorboard", "wandb", "trackio"]

VerifyMode = Literal["first", "background", "off"]

PresetName = Literal[
    "quickstart", "baby", "tutorial", "wikitext", "finetune", "fineweb", "speedrun", "gpt2", "gpt2-medium",
    "gpt2-large", "gpt2-xl",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig(PrepareOptions):
    """The options of `owt-data prepare`, and where the text is prepared.

    The fields that this class adds do not change the tokens.

    Raises:
        ValueError: a field is out of its range.
    """

    num_processes: int | None = field(default=None, metadata=FREE)
    """Tokenizing processes; none is one for each usable CPU."""

    on_cluster: bool = field(default=False, metadata=FREE)
    """Tokenize as tasks of the Ray cluster. All its nodes must share `cache_path`."""

    cache_path: str | None = field(default=None, metadata=FREE)
    """Folder of prepared tokens, shared by all nodes; none takes the user's cache."""

    def __post_init__(self) -> None:
        """Check every field once."""
        check_fields(self, "prepare.")
        check_tokenizer_name(self.tokenizer)
        PrepareOptions.__post_init__(self)
        check_no_credentials("prepare.cache_path", self.cache_path)
        if self.num_processes is not None:
            _check_range("prepare.num_processes", self.num_processes, 1)

    def options(self) -> PrepareOptions:
        """Return the options of `prepare`, which decide the tokens."""
        return PrepareOptions(**{field.name: getattr(self, field.name) for field in fields(PrepareOptions)})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(GPT2Config):
    """The model, whose vocabulary may follow from the tokenizer.

    Raises:
        ValueError: a field is out of its range.
    """

    vocab_size: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride] - resolved before use
    """Number of token ids; none takes the tokenizer's."""

    def __post_init__(self) -> None:
        """Check every field once."""
        check_fields(self, "model.")
        if self.vocab_size is None:
            dataclasses.replace(self, vocab_size=1)  # checks the other fields
            return
        try:
            GPT2Config.__post_init__(self)
        except ValueError as error:
            raise ValueError(f"model.{error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The length of a run, and the intervals in it.

    Raises:
        ValueError: a field is out of its range.
    """

    global_batch_size: int = 32
    """Windows per step, over all workers."""

    max_steps: int = 1000
    """Steps of the run. `max_epochs` and `max_tokens` replace this number."""

    max_epochs: float | None = None
    """Epochs of the run: passes over the training windows, rounded down to a step."""

    max_tokens: int | None = None
    """Training tokens of the run, rounded up to a step. With `max_epochs`, the run ends at the first of the two."""

    log_every: int = field(default=10, metadata=FREE)
    """Steps between two records of metrics."""

    eval_every: int = field(default=100, metadata=FREE)
    """Steps between two validations."""

    eval_tokens: int | None = field(default=655_360, metadata=FREE)
    """Validation tokens of one validation, as windows spread evenly over all of them; none takes all. After the last
    step, all validation tokens are evaluated once."""

    eval_tasks: tuple[str, ...] = field(default=(), metadata=FREE)
    """Tasks of lm-eval on which saved checkpoints are scored, as in `eval --tasks`, such as hellaswag:500. A process of
    low priority computes on the CPUs of the first worker's machine while the run trains. It needs `uv run --extra
    eval`."""

    eval_tasks_every: int | None = field(default=None, metadata=FREE)
    """Steps between two checkpoints that are scored on `eval_tasks`, a multiple of `checkpoint_every`; none scores the
    last one alone. Such a checkpoint is kept until the one after the next."""

    sample_tokens: int = field(default=64, metadata=FREE)
    """Tokens of the sample that each validation takes from each prompt; 0 for no samples, and no text at the end."""

    checkpoint_every: int = field(default=100, metadata=FREE)
    """Steps between two checkpoints."""

    checkpoints_to_keep: int | None = field(default=2, metadata=FREE)
    """Number of the newest checkpoints to keep; none keeps all."""

    keep_every: int | None = field(default=None, metadata=FREE)
    """Steps between two checkpoints that are kept for good; none keeps no such checkpoints."""

    keep_best: bool = field(default=True, metadata=FREE)
    """Keep the checkpoint with the lowest validation loss too."""

    early_stop_evals: int | None = None
    """Validations without a lower loss after which the run ends; none runs to the last step."""

    grad_accum_steps: int = 1
    """Microbatches per step, computed one after the other to save memory. `micro_batch_size` replaces this number."""

    micro_batch_size: int | Literal["auto"] | None = None
    """Windows at most in the microbatch of one device. The run then takes the fewest `grad_accum_steps` that its first
    devices need, and keeps them. auto takes the largest microbatch that fits the devices, by some compilations."""

    num_shards: int | None = None
    """Shards of a batch, a power of two such as 8: the gradient of each is computed alone, and they are added in a
    fixed order. The result is then the same, to the bit, on 1, 2, 4, ... workers up to this number, and with `local`.
    None adds the gradients in the order that is fastest for the workers."""

    order: OrderKind | None = None
    """Order of the training windows: `shuffle` (each window once per epoch), `random` (with replacement), `sequential`,
    or `sequential-first` (`sequential` in the first epoch, then `shuffle`). None is `shuffle`, or `sequential-first`
    with `--data-mode stream`, which can read no other than the last two."""

    mask_documents: bool = False
    """Restrict attention to a token's own document. Otherwise a token sees the documents before it in its window, as in
    GPT-2."""

    stop_after_bad_steps: int | None = field(default=50, metadata=FREE)
    """Steps in a row without a finite loss and gradient after which the run ends as failed, at the next record of
    metrics. Such a step is skipped: it keeps the parameters. None goes on."""

    max_failures: int = field(default=3, metadata=FREE)
    """Failures without progress since the last checkpoint to recover from; -1 for any number."""

    hang_timeout_s: float | None = field(default=60.0, metadata=FREE)
    """Seconds without a step after which the workers start again from the newest checkpoint, if a worker does not
    answer; five times as long if all answer, and at least 20 times the usual time of a step. none waits forever."""

    def __post_init__(self) -> None:
        """Check every field once."""
        check_fields(self, "train.")
        for name, least, end in (
            ("global_batch_size", 1, MAX_COUNT + 1),
            ("max_steps", 1, MAX_STEPS + 1),
            ("log_every", 1, math.inf),
            ("eval_every", 1, math.inf),
            ("eval_tokens", 1, math.inf),
            ("eval_tasks_every", 1, math.inf),
            ("sample_tokens", 0, MAX_SAMPLE_TOKENS + 1),
            ("checkpoint_every", 1, math.inf),
            ("checkpoints_to_keep", 1, math.inf),
            ("keep_every", 1, math.inf),
            ("early_stop_evals", 1, math.inf),
            ("grad_accum_steps", 1, math.inf),
            ("micro_batch_size", 1, math.inf),
            ("num_shards", 1, MAX_COUNT + 1),
            ("stop_after_bad_steps", 1, math.inf),
            ("max_failures", -1, math.inf),
            ("max_tokens", 1, math.inf),
        ):
            if (value := getattr(self, name)) is not None and value != "auto":
                _check_range(f"train.{name}", value, least, end)
        if self.hang_timeout_s is not None:
            _check_range("train.hang_timeout_s", self.hang_timeout_s, 5, _MAX_WAIT_S)
        if self.max_epochs is not None and not 0 < self.max_epochs <= MAX_FLOAT:
            raise ValueError(f"train.max_epochs must be above 0 and at most {MAX_FLOAT}, got {self.max_epochs}.")
        if self.num_shards is not None and self.num_shards & (self.num_shards - 1):
            raise ValueError(f"train.num_shards must be a power of two, got {self.num_shards}. Choose 4 or 8.")
        if self.eval_tasks:
            parse_tasks(self.eval_tasks, option="train.eval_tasks")
        if self.eval_tasks_every is not None and self.eval_tasks_every % self.checkpoint_every:
            raise ValueError(
                f"train.eval_tasks_every must be a multiple of train.checkpoint_every, {self.checkpoint_every}, got "
                f"{self.eval_tasks_every}. Change one of the two."
            )
        if self.global_batch_size % self.grad_accum_steps:
            raise ValueError(
                f"train.global_batch_size must be divisible by train.grad_accum_steps, {self.grad_accum_steps}, got "
                f"{self.global_batch_size}. Change one of the two."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """The mesh of devices. The axis `data` takes the devices that `fsdp` and `tensor` leave.

    Raises:
        ValueError: a field is out of its range.
    """

    fsdp: int = 1
    """Devices that share one copy of the parameters and of the optimizer state, each with its own share of the
    batch."""

    tensor: int = 1
    """Devices of one worker that share each layer's heads and MLP."""

    def __post_init__(self) -> None:
        """Check every field once."""
        check_fields(self, "mesh.")
        for name in ("fsdp", "tensor"):
            _check_range(f"mesh.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """Train a model, or continue an interrupted run.

    Raises:
        ValueError: a field is out of its range.
    """

    preset: PresetName = field(default="quickstart", metadata=FREE)
    """Source of every other default."""

    from_checkpoint: str | None = None
    """Start a new run from all that a checkpoint holds: RUN, RUN@STEP or RUN@best. Every other default is the setting
    of that run. With the same settings, the new run repeats it to the bit."""

    anneal: int | None = None
    """Steps in which a run of --from lowers its learning rate to the minimum, and after which it ends."""

    init_from: str | None = None
    """Start a new run from weights alone: RUN, RUN@STEP or RUN@best, a folder of `export`, or published weights, such
    as gpt2, gpt2-medium, gpt2-large or gpt2-xl. The weights decide the size of the model; --model.seq-len may be
    shorter."""

    extend: bool = field(default=False, metadata=FREE)
    """Continue a run to another number of steps although its past learning rates depend on that number. From there
    on, the rate is that of the new length."""

    data: str = "builtin"
    """Training data: builtin (Python's standard library), a folder of token files, a .bin, .txt, .jsonl or .parquet
    file, a glob of files of one kind, s3://... or gs://... of token files, or a Hugging Face dataset, such as
    openwebtext, fineweb or fineweb-edu. Or two such names as train=A,val=B, or several with weights, such as
    web=0.7:A,code=0.3:B. In quotes, a weight may change: "web=0.7>0.3@5000:A,code=0.3>0.7@5000:B" has the second
    weights after 5,000 steps."""

    data_mode: Literal["prepared", "stream"] = "prepared"
    """`prepared` tokenizes all text before the training. `stream` trains while the text is tokenized, by tasks of the
    Ray cluster or by processes of this machine; the first epoch then has the order of the text, and `--split auto` is
    `start`."""

    verify_data: VerifyMode = field(default="background", metadata=FREE)
    """Comparison of the token files with the SHA-256 in their manifest, once per file: `background` while the run
    trains, `first` before the training. A damaged file ends the run."""

    hardware: str = field(default="auto", metadata=FREE)
    """auto, local (in this process, without Ray), cpu:WORKERS, cpu:WORKERSxDEVICES, gpu:WORKERS, gpu:WORKERSxGPUS,
    either with :TYPE such as gpu:8:h100, tpu:TYPE:TOPOLOGY or tpu:TYPE:TOPOLOGY:SLICES; a range of WORKERS or SLICES,
    such as 1-4, is elastic."""

    storage_path: str = field(default="runs", metadata=FREE)
    """Folder of all runs, shared by all nodes; or s3://... or gs://..."""

    name: str | None = field(default=None, metadata=FREE)
    """Name of the run, a folder in the storage path; none takes the preset's, the data's, and each option that changes
    the result and differs from the preset, such as baby-book-lr3e-4-seed2. The length is not in it: a run may be
    extended."""

    wait_for_resources_s: float = field(default=0.0, metadata=FREE)
    """Seconds to wait for nodes that the Ray cluster lacks, for instance until its autoscaler adds them."""

    seed: int = 2357
    """Seed of the initial parameters, of dropout and of the window order."""

    prompts: tuple[str, ...] = field(default=("\n",), metadata=FREE)
    """Prompts of the samples. The first is also that of the text at the end."""

    trackers: tuple[TrackerName, ...] = field(default=("tensorboard",), metadata=FREE)
    """Programs that get the metrics, the samples and the configuration: any of tensorboard, wandb, trackio; no value
    for no program. wandb and trackio need `uv run --extra NAME`."""

    profile: str | None = field(default=None, metadata=FREE)
    """Steps to profile on the first worker, as FIRST:END without END: 100:105 is the steps 100 to 104. TensorBoard
    with the package xprof shows the trace."""

    peak_tflops: float | None = field(default=None, metadata=FREE)
    """Peak of one device in TFLOP/s, for the MFU; none takes the known peak of the device, or no MFU."""

    dashboard: bool = field(default=False, metadata=FREE)
    """Start Ray's dashboard, and print its URL."""

    prepare: PrepareConfig
    """The options of `owt-data prepare`, and where the text is prepared."""

    model: ModelConfig
    """The model."""

    train: TrainConfig
    """The length of the run, and the intervals in it."""

    optimizer: OptimizerConfig
    """The optimizer."""

    mesh: MeshConfig = field(default_factory=MeshConfig, metadata=FREE)
    """The mesh of devices."""

    def __post_init__(self) -> None:
        """Check what no section checks."""
        check_fields(self)
        for name in ("data", "storage_path"):
            check_no_credentials(name, getattr(self, name))
        if self.hardware != "auto":
            parse_hardware(self.hardware)
        _check_range("seed", self.seed, 0, NUM_SEEDS)
        if self.anneal is not None:
            _check_range("anneal", self.anneal, 1, MAX_STEPS + 1)
            if self.from_checkpoint is None:
                raise ValueError(f"anneal must be given with --from, got {self.anneal} alone. Name a checkpoint.")
        if self.from_checkpoint is not None and self.init_from is not None:
            raise ValueError(
                f"--from and --init-from must not be given together, got {short(self.from_checkpoint)} and "
                f"{short(self.init_from)}. Leave one out."
            )
        _check_range("wait_for_resources_s", self.wait_for_resources_s, 0, _MAX_WAIT_S)
        if self.name is not None:
            check_run_name(self.name)
            if "@" in self.name:
                raise ValueError(f"name must have no @, got {short(self.name)}. RUN@STEP names a checkpoint of a run.")
        try:
            self.model.check_trainable()
        except ValueError as error:
            raise ValueError(f"model.{error}") from None
        if self.model.vocab_size is not None:
            self.model.check_axes(fsdp=self.mesh.fsdp, tensor=self.mesh.tensor)
        if self.train.num_shards is not None and self.mesh != MeshConfig():
            raise ValueError(
                "train.num_shards must not be given with mesh.fsdp or mesh.tensor above 1: each device computes with a "
                f"copy of the parameters, got {self.mesh.fsdp} and {self.mesh.tensor}. Leave one out."
            )
        if not self.prompts or not all(self.prompts):
            raise ValueError(
                f"prompts must be texts of at least one character, got {shown(list(self.prompts))}. Leave them out for "
                "a line break."
            )
        if self.peak_tflops is not None:
            _check_range("peak_tflops", self.peak_tflops, *_PEAKS_TFLOPS)
        if self.profile is not None:
            profiled_steps(self.profile)

    def with_options(self, options: Mapping[str, Any]) -> "PretrainConfig":
        """Return the configuration with other values of some options, as in a file of `--config`.

        >>> from pretrain import PRESETS
        >>> config = PRESETS["wikitext"]().with_options({"train.max_steps": 40, "optimizer.learning_rate": 1e-3})
        >>> config.train.max_steps, config.train.max_epochs, config.optimizer.learning_rate
        (40, None, 0.001)

        Args:
            options: values by the names of the options, with `_` or `-`. A new length replaces the former one, and new
                microbatches the former ones.

        Raises:
            UsageError: there is no such option.
            ValueError: a value has another type, or is out of its range.
        """
        known, values = [*_option_names(self)], dict[str, Any]()
        for given, value in options.items():
            name = given.replace("-", "_") if isinstance(given, str) else given
            if name not in known:
                similar = nearest_option(str(name).replace("_", "-"), [one.replace("_", "-") for one in known])
                remedy = f"; did you mean {similar.replace('-', '_')}?" if similar else "."
                raise UsageError(f"no option {shown(given)} of a configuration{remedy}")
            values[name] = tuple(value) if isinstance(value, list) else value
        return replace_options(self, without_replaced(values))


def without_replaced(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return options whose length and microbatches replace those of the preset, of a file or of another run."""
    unset: dict[str, Any] = {}
    for alternatives in (LENGTHS, MICROBATCHES):
        if any(name in values for name in alternatives):
            unset |= dict.fromkeys(alternatives[1:])
    return {**unset, **values}


def replace_options(config: PretrainConfig, values: Mapping[str, Any]) -> PretrainConfig:
    """Return a configuration with other values of options, by their dotted names.

    Raises:
        ValueError: a value has another type, or is out of its range.
    """
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        sections.setdefault(section, {})[last] = value
    top = sections.pop("", {})
    for section, changes in sections.items():
        top[section] = _with_fields(config, section, changes)
    return dataclasses.replace(config, **top)


def _with_fields(config: PretrainConfig, section: str, changes: Mapping[str, Any]) -> Any:
    """Return a section with other fields. An error of another package begins with a field, without its section."""
    former = getattr(config, section)
    try:
        return dataclasses.replace(former, **changes)
    except ValueError as error:
        is_field = str(error).partition(" ")[0] in {field.name for field in fields(former)}
        raise UsageError(f"{section}.{error}" if is_field else str(error)) from error


def _option_names(config: PretrainConfig) -> Iterator[str]:
    """Yield the names of all options but `preset`, which is the origin of the values."""
    for one in fields(config):
        section = getattr(config, one.name)
        if dataclasses.is_dataclass(section):
            yield from (f"{one.name}.{inner.name}" for inner in fields(section))
        elif one.name != "preset":
            yield one.name


def profiled_steps(text: str) -> range:
    """Parse the steps of `profile`.

    >>> profiled_steps("100:105")
    range(100, 105)

    Args:
        text: the first step and the end, which is not profiled.

    Raises:
        ValueError: the text is not two numbers with a colon, or the steps are none.
    """
    first, colon, end = text.partition(":")
    steps = range(0)
    if colon and all(number.isdecimal() and len(number) <= _STEP_DIGITS for number in (first, end)):
        steps = range(int(first), int(end))
    if not steps or steps.start < 1:
        raise ValueError(f"profile must be FIRST:END with 1 <= FIRST < END, such as 100:105, got {short(text)}.")
    return steps


def with_vocab_size(config: PretrainConfig, vocab_size: int) -> PretrainConfig:
    """Return the configuration with a vocabulary of this size."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))


def _check_range(name: str, value: float, least: float, end: float = math.inf) -> None:
    if not least <= value < end:
        below = f" and below {end}" if isinstance(end, float) else f" and at most {end - 1}"
        below = "" if end == math.inf else below
        raise ValueError(f"{name} must be at least {least}{below}, got {value}.")
