"""The commands, each with its options and its examples."""

from dataclasses import dataclass, field
from typing import Literal

from pretrain._config import PretrainConfig

_RUN = {"placeholder": "RUN"}

Shell = Literal["bash", "zsh", "fish"]
"""A shell that completes commands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCommand:
    """Continue a prompt with a trained model."""

    run: str = field(metadata=_RUN)
    """The run's folder or URI, or its name in ./runs, for its newest checkpoint; RUN@STEP for that of a step; RUN@best
    for the lowest validation loss. Or a folder of `export`, or published weights such as gpt2 or OWNER/NAME."""

    prompt: str = "\n"
    """The beginning of the text. An empty text starts a document."""

    interactive: bool = False
    """Read prompts from standard input, a line each, in place of --prompt."""

    max_new_tokens: int = 400
    """Number of tokens to add."""

    temperature: float = 0.8
    """Randomness of the draw; 0 takes the most likely token each time."""

    top_k: int | None = 40
    """Draw from the top_k most likely tokens, at least 1; none draws from all tokens."""

    top_p: float | None = None
    """Draw from the most likely tokens whose probabilities sum to top_p; none draws from all tokens."""

    seed: int = 0
    """Seed of the draw. The same seed gives the same text."""

    num_samples: int = 1
    """Number of texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalCommand:
    """Evaluate a trained model: its loss, or its scores on tasks.

    The loss, as JSON, is that of all validation tokens of the run, or of other data.
    """

    run: str = field(metadata=_RUN)
    """The run's folder or URI, or its name in ./runs, for its newest checkpoint; RUN@STEP for that of a step; RUN@best
    for the lowest validation loss. Or a folder of `export`, or published weights such as gpt2 or OWNER/NAME."""

    data: str | None = None
    """Data in the forms of the command train; text is prepared first. None takes the run's token files. A model that
    is not that of a run needs it."""

    split: Literal["val", "all"] | None = None
    """The part of the data. None is val, or all of data without a validation split of its own, such as a text."""

    text_column: str | None = None
    """Column with the text of --data; none takes the column of the run's text."""

    batch_size: int = 32
    """Windows per step."""

    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval in place of data, such as hellaswag,piqa; or YAML files of tasks, or folders of them. NAME:N
    takes N documents. They need `uv run --extra eval`."""

    limit: int | None = None
    """Documents of each task, from the first one on; none takes all."""

    json: bool = False
    """Print the scores on tasks as one line of JSON, in place of a table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCommand:
    """Write a trained model in Hugging Face's format.

    With its tokenizer and a card. transformers, vLLM and others read it.
    """

    run: str = field(metadata=_RUN)
    """The run's folder or URI, or its name in ./runs, for its newest checkpoint; RUN@STEP for that of a step; RUN@best
    for the lowest validation loss. Or a folder of `export`, or published weights such as gpt2 or OWNER/NAME."""

    out: str = field(metadata={"placeholder": "OUT"})
    """A folder for the files, new or empty. It gets its name when it is complete."""

    weights: Literal["average", "last"] | None = None
    """The moving average of the weights, of a run with --optimizer.average-decay, or those of the step. None is the
    average if the run keeps one."""

    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type of the weights in the files; none is that of the run's weights."""

    push_to: str | None = None
    """Upload OUT to this repository of the Hugging Face hub, as one commit, by the token in HF_TOKEN or of
    `hf auth login`. A new repository is private. OUT may have the export already, with a README.md that you changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportCommand:
    """Write a page with the curves of runs, for a browser."""

    runs: tuple[str, ...] = field(metadata={"placeholder": "RUN"})
    """The folders or URIs of the runs, or their names in ./runs; or patterns such as 'lr-*'."""

    out: str | None = None
    """File of the page; none is report.html in the run's folder, or in the working folder for several runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareCommand:
    """Say whether a run is better than another, with intervals.

    From the losses of the same windows.
    """

    runs: tuple[str, ...] = field(metadata={"placeholder": "RUN"})
    """Two runs, A and B: folders, URIs, names in ./runs, or patterns of them, such as 'baby-*'."""

    against: tuple[str, ...] | None = None
    """The runs B, if there are several of each: RUN... are the runs A, and each seed has an A and a B."""

    at: int | None = None
    """The last step to compare, at least 40; none takes the last one that all runs have."""

    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlameCommand:
    """Show which documents a step of a run owes its loss to.

    Its windows and documents are ranked by what they add to its loss and to its gradient, with their text. The steps
    before it are computed again from a checkpoint, in this process. No file of the run is written.
    """

    run: str = field(metadata=_RUN)
    """The run's folder or URI, or its name in ./runs."""

    step: int | None = None
    """The step."""

    spike: bool = False
    """Take the step of the largest spike of the loss, in place of --step."""

    top: int = 5
    """Number of windows and of documents to show."""

    by: Literal["loss", "gradient"] = "loss"
    """The order: what a window or a document adds to the mean loss of the step, in nats; or its share in the squared
    norm of the step's gradient. Both are those of the parameters before the step, without dropout."""

    without: tuple[str, ...] = ()
    """Windows (w3) and documents (d17) of the step, by the ids of the tables. The steps from this one on are computed
    twice: as they were, and without these. Another window of the same step takes the place of a window that is one of
    these or holds a part of one of these documents, in all of the steps."""

    steps: int = 20
    """Number of steps that --without computes."""

    json: bool = False
    """Print one line of JSON, with all windows and documents and their texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffCommand:
    """Say whether two runs are the same to the bit.

    Where they are not, name the first step and the arrays that differ. The exit code is 0 if they are, 1 if not.
    """

    a: str = field(metadata={"placeholder": "A"})
    """A run: its folder, URI, or name in ./runs; or a checkpoint of it, RUN@STEP or RUN@best."""

    b: str = field(metadata={"placeholder": "B"})
    """Another run; or a checkpoint, if A is one."""

    elements: bool = False
    """Read the arrays that differ, count their elements that differ, and find the largest difference."""

    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCommand:
    """Compute steps of a run again, and compare the bits.

    All that the run has recorded of these steps is compared: losses, windows, gradient norms, and the arrays of
    checkpoints. Nothing is written, and the run may train. The exit code is 0 if all is equal, 1 if not.
    """

    run: str = field(metadata=_RUN)
    """The run's folder or URI, or its name in ./runs."""

    from_step: int | None = None
    """Compare the steps after this one. They are computed from the newest checkpoint up to it, or from step 0, where
    parameters are random. None takes the oldest checkpoint."""

    to_step: int | None = None
    """The last step to compare. None takes the newest checkpoint."""

    step: int | None = None
    """Compare this step alone."""

    hardware: str | None = None
    """Compute on this hardware, in the forms of the command train. None takes the hardware of the run: other numbers of
    workers or devices change the last digits."""

    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyCommand:
    """Prove that kills change no bit: train, kill, compare.

    A small run is trained undisturbed, on one device. It is trained again on other workers, while its processes are
    killed by SIGKILL at random places: a worker, or the command, which is then started again. Losses, windows,
    parameters and optimizer of the two runs are compared. The exit code is 0 if all is equal, 1 if not. No process is
    left, and no file if all is equal.
    """

    kills: int = 4
    """Number of kills, at most 20."""

    hardware: str = "cpu:2"
    """Hardware of the second run: cpu:WORKERS or gpu:WORKERS of 1, 2 or 4 workers, a range such as cpu:1-4, or local,
    where each kill is one of the command."""

    data: str = "builtin"
    """Training data, in the forms of the command train. builtin is cut to some modules of Python's standard library."""

    seed: int = 0
    """Seed of the places of the kills."""

    keep: str | None = None
    """Folder for the two runs and all output, new or empty. None takes a temporary folder, which is deleted unless the
    runs differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunsCommand:
    """List all runs, with their losses."""

    storage_path: str = field(default="runs", metadata={"placeholder": "STORAGE_PATH"})
    """Folder of all runs, or s3://... or gs://..."""

    globs: tuple[str, ...] = field(default=(), metadata={"placeholder": "GLOB"})
    """Patterns of names, such as 'baby-*-seed1'; none for all runs. The first may stand for STORAGE_PATH."""

    sort: str | None = None
    """Column to sort by, such as val_loss, loss, step, age, name, or an option that differs, such as lr. Default: the
    newest run last."""

    columns: str | None = None
    """Columns to show, such as run,lr,val. Default: all that fit, and each option that changes the result and differs
    between the runs."""

    group_by: Literal["seed"] | None = None
    """Make one row of the runs that are equal but for the seed: the mean of their validation losses, its spread
    (standard deviation), and the rank. Finished runs alone count."""

    json: bool = False
    """Print one line of JSON, with all numbers and the options that differ."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchCommand:
    """Show a run live, from any machine that sees its folder."""

    run: str = field(metadata=_RUN)
    """The run's folder or URI, or its name in ./runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataCommand:
    """Show the text of any step of a run, past or to come.

    Or show the steps that read a text or a document.
    """

    run: str = field(metadata=_RUN)
    """The run's folder or URI, or its name in ./runs."""

    step: int | None = None
    """Show the windows of this step: their documents, with file and row of the source, and their text."""

    find: str | None = None
    """Show the documents with this text, and the steps at which they were and will be read. The exit code is 1 if none
    has it."""

    document: int | None = None
    """Show this document, by its id as --step and --find print it, and the steps that read it."""

    full: bool = False
    """Show all of the text, and all documents and steps."""

    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Say what a run needs, before it starts.

    Takes every option of `train`.
    """

    price_per_hour: float | None = None
    """Price of all planned devices for an hour, to show the price of the run."""

    measure: bool = False
    """Run 20 steps on the devices of this machine, and show their time."""

    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCommand:
    """The request to say what a run needs."""

    config: PretrainConfig
    """Configuration of the run to plan."""

    options: PlanOptions
    """The options of the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorCommand:
    """Check this machine, its storage and its network.

    Each check is ok, warn or fail, with one thing to do. No file stays. The exit code is 1 if a check fails.
    """

    hardware: str = "auto"
    """Hardware to use, in the forms of the command train. local needs no Ray."""

    storage_path: str = "runs"
    """Folder of all runs, or s3://... or gs://...: a small file in it is written, read, listed and deleted."""

    data: str | None = None
    """Data to use, in the forms of the command train. It must exist, or its hub must answer. None checks no data."""

    tokenizer: str | None = None
    """Tokenizer to use. None looks for the files of gpt2, which a run may not need."""

    json: bool = False
    """Print one line of JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """Train a run for each combination of values of options.

    Takes the options of `train`.
    """

    file: str | None = field(default=None, metadata={"placeholder": "FILE"})
    """A .toml file of options, as for --config, with a table [grid]: lists of values, by the names of the options."""

    grid: tuple[str, ...] = ()
    """Options with their values, such as optimizer.learning-rate=1e-4,3e-4 seed=1,2,3. Each combination is a run, with
    its default name."""

    parallel: int = 1
    """Runs at once, each with the devices of --hardware."""

    dry_run: bool = False
    """Print the names and the commands of the runs, and start nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepCommand:
    """The request to train several runs."""

    configs: tuple[PretrainConfig, ...]
    """Configuration of each run."""

    arguments: tuple[tuple[str, ...], ...]
    """The arguments of the command `train` that give each configuration."""

    parallel: int
    """Runs at once."""

    dry_run: bool
    """True to print the commands alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigOptions:
    """Options of the commands `train` and `plan` that are not part of a configuration."""

    config: str | None = None
    """A .toml file with options, or the config.json of a run. It replaces defaults of the preset, and the options of
    the command line replace it."""

    print_config: bool = False
    """Print the configuration as TOML, for --config, and start nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Options of the command `train` about its output."""

    quiet: bool = False
    """Print errors, and one line with the result."""

    verbose: bool = False
    """Print what the libraries log in the process of the command too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShowConfig:
    """The request to print a configuration."""

    config: PretrainConfig
    """The configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainCommand:
    """The request to train with less or with more output."""

    config: PretrainConfig
    """The configuration."""

    output: Literal["quiet", "verbose"]
    """Errors and the result alone, or the logs of the libraries too."""


GROUPS: dict[str, dict[str, type]] = {
    "train": {"train": PretrainConfig, "plan": PlanOptions, "sweep": SweepOptions, "doctor": DoctorCommand},
    "look": {
        "watch": WatchCommand, "runs": RunsCommand, "report": ReportCommand, "sample": SampleCommand,
        "eval": EvalCommand,
    },
    "compare": {"compare": CompareCommand},
    "prove": {
        "verify": VerifyCommand, "diff": DiffCommand, "replay": ReplayCommand, "data": DataCommand,
        "blame": BlameCommand,
    },
    "hand over": {"export": ExportCommand},
}  # fmt: skip
"""The commands by their purpose, in the order of the help."""

COMMANDS: dict[str, type] = {name: kind for commands in GROUPS.values() for name, kind in commands.items()}

EXAMPLES = {
    "train": (
        "pretrain --preset baby --data book.txt --train.max-steps 500",
        "pretrain --preset finetune --data book.txt --name tuned",
    ),
    "plan": (
        "pretrain plan --preset gpt2 --hardware gpu:8:h100 --price-per-hour 24",
        "pretrain plan --preset baby --train.global-batch-size 48",
    ),
    "sweep": (
        "pretrain sweep --preset baby --data book.txt --grid optimizer.learning-rate=3e-4,1e-3 seed=1,2,3",
        "pretrain sweep sweep.toml --hardware gpu:1 --parallel 8",
    ),
    "doctor": (
        "pretrain doctor",
        "pretrain doctor --hardware gpu:8 --storage-path s3://bucket/runs --data openwebtext --tokenizer gpt2 --json",
    ),
    "sample": (
        "pretrain sample quickstart-builtin --prompt 'def ' --num-samples 3",
        "pretrain sample s3://bucket/runs/first --temperature 0 --max-new-tokens 50",
    ),
    "eval": (
        "pretrain eval quickstart-builtin",
        "pretrain eval gpt2 --tasks hellaswag:500,lambada_openai,piqa --json",
    ),
    "export": (
        "pretrain export quickstart-builtin exported",
        "pretrain export runs/first@best exported/first --dtype bfloat16 --push-to someone/first",
    ),
    "report": (
        "pretrain report quickstart-builtin",
        "pretrain report runs/first runs/second --out comparison.html",
    ),
    "compare": (
        "pretrain compare runs/first runs/second",
        "pretrain compare a-1 a-2 a-3 --against b-1 b-2 b-3 --at 2000",
    ),
    "blame": ("pretrain blame quickstart-builtin --spike", "pretrain blame runs/first --step 1200 --without d17 w3"),
    "diff": (
        "pretrain diff runs/first runs/second",
        "pretrain diff first@500 second@500 --elements",
    ),
    "verify": ("pretrain verify", "pretrain verify --kills 8 --hardware cpu:4 --seed 1"),
    "replay": ("pretrain replay runs/first", "pretrain replay first --from 500 --to 750"),
    "runs": ("pretrain runs s3://bucket/runs", "pretrain runs 'baby-*' --group-by seed"),
    "watch": ("pretrain watch quickstart-builtin", "pretrain watch s3://bucket/runs/first"),
    "data": ("pretrain data quickstart-builtin --step 120", "pretrain data runs/first --find 'a sentence' --json"),
}
"""Two command lines of each command, for its help."""

FREQUENT = (
    "preset", "data", "name", "config", "from_checkpoint", "init_from", "hardware", "storage_path",
    "train.max_steps", "train.global_batch_size", "optimizer.learning_rate", "model.num_layers", "model.num_heads",
    "model.embed_dim", "model.seq_len", "prepare.tokenizer", "data_mode", "print_config",
)  # fmt: skip
"""The options of the command `train` that most users change."""
