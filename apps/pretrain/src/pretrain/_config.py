"""The configuration of a run: everything that the command line can change."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from nnx_gpt2 import GPT2Config, OptimizerConfig
from owt_data import OrderKind, PrepareOptions
from ray_jax_launch import check_run_name

MAX_STEPS = 2**31 - 1
"""Steps are counted by numbers of 32 bits."""

NUM_SEEDS = 2**63
"""Seeds are below this: they are signed numbers of 64 bits."""

PresetName = Literal["quickstart", "baby", "tutorial", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The length and the rhythm of a run.

    Raises:
        ValueError: a field is out of its range.
    """

    global_batch_size: int = 32
    """Windows per step, over all workers."""

    max_steps: int = 1000
    """Updates to make in all."""

    log_every: int = 10
    """Steps between two lines of metrics."""

    eval_every: int = 100
    """Steps between two validations."""

    eval_batches: int = 20
    """Validation looks at the first windows of the validation tokens, this many global batches of them, and
    always at the same ones."""

    checkpoint_every: int = 100
    """Steps between two checkpoints."""

    checkpoints_to_keep: int = 2
    """How many of the newest checkpoints to keep."""

    grad_accum_steps: int = 1
    """Parts that a batch is processed in, one after the other, to save memory."""

    order: OrderKind = "shuffle"
    """Order of the training windows: `shuffle` (each once per epoch), `random` (with replacement) or
    `sequential`."""

    mask_documents: bool = False
    """Attention stays within a document. Otherwise a window's documents see what came before them, as in GPT-2."""

    max_failures: int = 3
    """Worker failures to recover from, from the newest checkpoint, before giving up."""

    def __post_init__(self) -> None:
        """Check every field once."""
        for name in (
            "global_batch_size",
            "max_steps",
            "log_every",
            "eval_every",
            "eval_batches",
            "checkpoint_every",
            "checkpoints_to_keep",
            "grad_accum_steps",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"train.{name} must be at least 1, got {value}")
        if self.max_steps > MAX_STEPS:
            raise ValueError(f"train.max_steps must be at most {MAX_STEPS}, got {self.max_steps}")
        if self.max_failures < 0:
            raise ValueError(f"train.max_failures must not be negative, got {self.max_failures}")
        if self.global_batch_size % self.grad_accum_steps:
            raise ValueError(
                "train.grad_accum_steps must divide train.global_batch_size, "
                f"got {self.grad_accum_steps} and {self.global_batch_size}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """How the devices share the work. What `fsdp` and `tensor` leave of them shares the batch alone.

    Raises:
        ValueError: a field is out of its range.
    """

    fsdp: int = 1
    """Devices that share one copy of the parameters and the optimizer's state, each with its part of the batch."""

    tensor: int = 1
    """Devices of one worker that share each layer's heads and hidden units."""

    def __post_init__(self) -> None:
        """Check every field once."""
        for name in ("fsdp", "tensor"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"mesh.{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """All of a run."""

    preset: PresetName = "quickstart"
    """Where every other default comes from."""

    data: str = "builtin"
    """What to train on: builtin (Python's standard library), a folder of token files, a .bin, .txt, .jsonl or
    .parquet file, a glob of files of one kind, s3://... or gs://... of token files, or a Hugging Face dataset."""

    hardware: str = "auto"
    """auto, cpu:WORKERS, gpu:WORKERS, gpu:WORKERSxGPUS, tpu:TYPE:TOPOLOGY or tpu:TYPE:TOPOLOGY:SLICES; a range
    of WORKERS or SLICES, such as 1-4, is elastic."""

    storage_path: str = "runs"
    """Folder that holds runs, shared by all nodes where there are several; or s3://... or gs://..."""

    name: str | None = None
    """The run's name, a folder in the storage path. Default: the preset's and the data's."""

    wait_for_resources_s: float = 0.0
    """Seconds to wait for nodes that the Ray cluster lacks, for instance until its autoscaler adds them."""

    seed: int = 2357
    """Seed of the initial parameters, of dropout and of the window order."""

    prompt: str = "\n"
    """What the sample at the end begins with."""

    prepare: Annotated[PrepareOptions, tyro.conf.arg(name="")]
    """How text becomes tokens."""

    model: GPT2Config
    """The model."""

    train: TrainConfig
    """The run's length and rhythm."""

    optimizer: OptimizerConfig
    """The optimizer."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    """How the devices share the work."""

    def __post_init__(self) -> None:
        """Check what no section checks."""
        for name, end in (("seed", NUM_SEEDS), ("wait_for_resources_s", math.inf)):
            if not 0 <= getattr(self, name) < end:
                raise ValueError(f"{name} must be at least 0 and below {end}, got {getattr(self, name)}")
        if self.name is not None:
            check_run_name(self.name)
        self.model.check_axes(fsdp=self.mesh.fsdp, tensor=self.mesh.tensor)
        if not self.prompt:
            raise ValueError("prompt must not be empty: the model continues something")
