"""The sections of a run's settings, one class each. Needs no torch.

Every field says what it means: `glm5-next train --help`, the documentation and error messages read it from here.
Types are strict (the text "5" is not a number). A setting that may be absent is written "none".
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from glm5_next.plugins.topology import Topology

# TOML has no null.
OrNone = BeforeValidator(lambda value: None if value == "none" else value)
FilePath = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    """What all sections share: no unknown key, no change after loading, no conversion between types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """Which weights are trained."""

    checkpoint: FilePath = Field(description="folder of a Hugging Face checkpoint: config.json, safetensors, tokenizer")
    megatron_checkpoint: Annotated[FilePath | None, OrNone] = Field(
        default=None,
        description='what "convert" or "prepare" made of that folder: ranks then load their weights from it, as Megatron '
        'saved them; "none" reads the folder itself',
    )
    precision: Literal["fp32", "bf16"] = Field(
        default="bf16", description="type of the trained weights and activations"
    )
    transformer_impl: Literal["auto", "transformer_engine", "local"] = Field(
        default="auto",
        description='linear layers and grouped experts: "transformer_engine", Megatron-Core\'s own ("local"), or "auto": '
        "Transformer Engine's for bf16 on a GPU, where it is installed",
    )
    kernels: str = Field(
        default="auto",
        pattern=r"^(auto|naive|\w+=\w+(,\w+=\w+)*)$",
        description='other operators: "auto" takes the fastest that fits the device, "naive" plain torch, '
        '"kda=fla,rms_norm=naive" names single ones and leaves the others to auto',
    )


class ParallelSection(Section):
    """How the model is spread over trainer ranks."""

    ranks: int = Field(default=1, ge=1, description="trainer processes, one per device (per process on a CPU)")
    tp: int = Field(default=1, ge=1, description="tensor-parallel size of the dense part")
    pp: int = Field(default=1, ge=1, description="pipeline stages")
    ep: int = Field(default=1, ge=1, description="expert-parallel size")
    etp: int = Field(default=1, ge=1, description="tensor-parallel size inside an expert")
    vpp: Annotated[int | None, OrNone] = Field(
        default=None, ge=2, description='model chunks per pipeline rank; "none" is one'
    )
    distributed_optimizer: bool = Field(default=True, description="split the optimizer state over data-parallel ranks")

    def topology(self) -> Topology:
        """Raises ValueError where the sizes do not fit the number of ranks."""
        return Topology(world_size=self.ranks, tp=self.tp, pp=self.pp, ep=self.ep, etp=self.etp, vpp=self.vpp)


class DataSection(Section):
    """What is asked and how an answer is judged."""

    prompts: str = Field(min_length=1, description='JSONL file of training prompts, or "tiny" for the built-in task')
    heldout: Annotated[str | None, OrNone] = Field(
        default=None, min_length=1, description='JSONL file of prompts that are never trained on, "tiny", or "none"'
    )
    reward: str = Field(
        default="exact",
        pattern=r"^(exact|math|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$",
        description='"exact", "math" (math-verify) or "module:function" called with (prompt, response text)',
    )
    shuffle: bool = Field(default=True, description="new order of the prompts in every epoch, derived from train.seed")


class GrpoSection(Section):
    """The objective."""

    clip_low: float = Field(default=0.2, ge=0, lt=1, description="the probability ratio is clipped below 1 - clip_low")
    clip_high: float = Field(default=0.28, ge=0, description="the probability ratio is clipped above 1 + clip_high")
    importance_sampling: Literal["truncated", "off"] = Field(
        default="truncated",
        description="weight tokens by trainer / engine probability, held between is_low and is_high",
    )
    is_low: float = Field(default=0.5, ge=0, description="smallest importance weight")
    is_high: float = Field(default=2.0, gt=0, description="largest importance weight")
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the starting checkpoint; 0 keeps no reference"
    )
    divide_by_std: bool = Field(
        default=True, description="divide a group's advantages by the standard deviation of its rewards"
    )
    drop_zero_spread: bool = Field(
        default=True, description="leave out groups whose rewards are all equal, and sample others"
    )
    max_resample_rounds: int = Field(
        default=3, ge=0, description="extra rounds of sampling per step to replace dropped groups"
    )
    mini_batches: int = Field(
        default=1, ge=1, description="optimizer updates per step; the step's groups are split over them"
    )


class OptimizerSection(Section):
    """Adam and its learning rate."""

    lr: float = Field(default=1e-6, gt=0, description="largest learning rate")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate at the end of a cosine or linear schedule")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), strict=False, description="decay of both moments, each in [0, 1)"
    )
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay")
    clip_grad: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 does not clip")
    schedule: Literal["constant", "cosine", "linear"] = Field(default="constant", description="of the learning rate")
    warmup_steps: int = Field(default=0, ge=0, description="steps over which the learning rate rises from 0")
    offload: bool = Field(default=False, description="keep the optimizer's state in host memory and update there")

    @field_validator("betas")
    @classmethod
    def _betas_are_decays(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("both must be in [0, 1)")
        return value


class ReplaySection(Section):
    """Which discrete choices the trainer's forward takes over instead of making its own.

    "record" costs one more forward pass per update; "engine" needs an engine that records.
    """

    routing: Literal["off", "record", "engine"] = Field(
        default="engine",
        description="experts of a token: chosen anew in every pass, as in the pass before the update, or as the engine did",
    )
    indexer: Literal["off", "record", "engine"] = Field(
        default="off",
        description="pools of earlier tokens that sparse attention reads: the same three choices",
    )
    routing_weights: Literal["recomputed", "engine"] = Field(
        default="recomputed",
        description="weights of replayed experts: the model's formula on the trainer's scores, or the engine's values",
    )


class TrainSection(Section):
    """How long, in which pieces, and what is kept."""

    steps: int = Field(default=100, ge=1, description="steps of the whole run, resumed parts included")
    seed: int = Field(default=0, ge=0, description="of prompt order and sampling")
    tokens_per_micro_batch: int = Field(
        default=8192, ge=1, description="most tokens packed into one row, before padding"
    )
    checkpoint_every: int = Field(default=20, ge=0, description="steps between checkpoints; 0 saves at the end only")
    keep_checkpoints: int = Field(default=2, ge=0, description="newest checkpoints kept; 0 keeps all")
    eval_every: int = Field(
        default=0, ge=0, description="steps between held-out evaluations; 0 evaluates at start and end only"
    )
    recompute: Literal["none", "full"] = Field(
        default="none", description="activations computed again in the backward pass"
    )
    max_start_mismatch_kl: float = Field(
        default=0.01,
        gt=0,
        description="the run stops if the first step's mean KL between engine and trainer is larger: they differ",
    )


class OutputSection(Section):
    """What a run writes, all of it under runs/<run id>/."""

    runs: FilePath = Field(default=Path("runs"), description="folder that holds the runs")
    run_id: Annotated[str | None, OrNone] = Field(
        default=None, pattern=r"^[\w.-]*\w[\w.-]*$", description='folder name of this run; "none" derives one'
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard events")
    plots: bool = Field(default=True, description="write PNG plots at the end")
