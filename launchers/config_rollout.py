"""How a run samples: the section of its settings, and which of them cannot be together. Needs no torch."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, field_validator

from glm5_next.launchers.config_sections import OrNone, Section


class RolloutSection(Section):
    """How responses are sampled."""

    engine: Literal["transformers", "sglang", "vllm"] = Field(
        default="transformers", description='who samples: "transformers" is part of the run, the others are servers'
    )
    num_engines: int = Field(default=1, ge=1, description="engines that share a step's prompts")
    prompts_per_step: int = Field(default=8, ge=1, description="prompts, and so groups, of one step")
    samples_per_prompt: int = Field(default=8, ge=1, description="responses to one prompt: the group that is compared")
    max_new_tokens: int = Field(default=1024, ge=1, description="response tokens after which a sample is cut off")
    temperature: float = Field(default=1.0, description="of sampling; only 1.0")
    top_p: float = Field(default=1.0, description="nucleus of sampling; only 1.0")
    batch_size: int = Field(
        default=32, ge=1, description="sequences that an engine generates at once (servers: requests in flight)"
    )
    urls: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="addresses of running servers; with none the run starts num_engines itself",
    )
    launch: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="words of the command that starts a server, with {checkpoint}, {host}, {port} and {key_file} in them; "
        "with none it is derived from the engine and the model",
    )
    engine_flags: tuple[str, ...] = Field(
        default=(), strict=False, description="more words for the derived command of a server"
    )
    engine_tp: int = Field(default=1, ge=1, description="tensor-parallel size, and so GPUs, of one server")
    api_key: str = Field(
        default="generated",
        pattern=r"^(generated|env:\w+|file:.+)$",
        description='key of the servers: "generated" by the run, "env:NAME" or "file:PATH"; it is never written down',
    )
    placement: Literal["disaggregated", "colocated"] = Field(
        default="disaggregated",
        description="servers have GPUs of their own, or live on those of the trainer ranks, a GPU of a server for each rank, "
        "and give their memory back while the trainer works",
    )
    transport: Literal["distributed", "disk"] = Field(
        default="distributed",
        description="how weights reach disaggregated servers: broadcast from trainer rank 0, or a folder that all nodes see; "
        "colocated ones read them in the trainer's memory",
    )
    request_deadline: float = Field(default=600.0, gt=0, description="seconds for one request to a server")
    sample_deadline: float = Field(
        default=1200.0, gt=0, description="seconds for one sample, all its requests together"
    )
    step_deadline: float = Field(default=2400.0, gt=0, description="seconds for one round of sampling")
    update_deadline: float = Field(default=600.0, gt=0, description="seconds for one piece of a weight update")
    start_deadline: float = Field(default=1800.0, gt=0, description="seconds until a server has loaded its weights")
    min_samples: Annotated[int | None, OrNone] = Field(
        default=None, ge=1, description='a group with fewer samples is dropped; "none" wants all samples_per_prompt'
    )
    one_step_off: bool = Field(
        default=False,
        description="sample step n + 1 while step n trains; its samples are from weights that are one update older",
    )
    max_restarts: int = Field(default=3, ge=0, description="times that the run starts servers again that have died")

    @field_validator("urls")
    @classmethod
    def _urls_are_http(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value) or not all(url.startswith(("http://", "https://")) for url in value):
            raise ValueError("every address must be different and start with http:// or https://")
        return value

    @field_validator("temperature", "top_p")
    @classmethod
    def _samples_the_policy_itself(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                "only 1.0 is supported: the engine's and the trainer's raw log-probabilities are compared, "
                "and they describe the sampled tokens only where nothing reshapes the distribution"
            )
        return value


def rollout_conflicts(rollout: RolloutSection, ranks: int) -> Iterator[str]:
    """Settings of this section that are wrong together, or beside that many trainer ranks."""
    if rollout.placement == "colocated":
        yield from _colocated_conflicts(rollout, ranks)
    if rollout.engine == "transformers" and (rollout.urls or rollout.launch or rollout.engine_flags):
        yield "rollout.urls, rollout.launch and rollout.engine_flags are for servers, but rollout.engine is 'transformers'"
    if rollout.urls and (rollout.launch or rollout.engine_flags):
        yield "rollout.urls names running servers, so rollout.launch and rollout.engine_flags would do nothing"
    if rollout.urls and rollout.api_key == "generated":
        yield "rollout.api_key is 'generated', which running servers (rollout.urls) cannot know; give env:NAME or file:PATH"
    if rollout.launch and rollout.engine_flags:
        yield "rollout.engine_flags adds to the derived command; with rollout.launch write the flags there"
    if rollout.min_samples is not None and rollout.min_samples > rollout.samples_per_prompt:
        yield (
            f"rollout.min_samples ({rollout.min_samples}) exceeds rollout.samples_per_prompt ({rollout.samples_per_prompt})"
        )
    if not rollout.request_deadline <= rollout.sample_deadline <= rollout.step_deadline:
        yield (
            f"rollout.request_deadline ({rollout.request_deadline:g}), sample_deadline ({rollout.sample_deadline:g}) and "
            f"step_deadline ({rollout.step_deadline:g}) must not decrease"
        )


def _colocated_conflicts(rollout: RolloutSection, ranks: int) -> Iterator[str]:
    here = "rollout.placement is 'colocated' but "
    if rollout.engine == "transformers":
        yield f"{here}rollout.engine is 'transformers', which is no server; use 'sglang' or 'vllm'"
        return
    if rollout.urls:
        yield f"{here}rollout.urls names running servers, which are on other GPUs; let the run start them"
    if rollout.one_step_off:
        yield f"{here}rollout.one_step_off is true: nothing is sampled while the trainer has the GPUs"
    if rollout.transport != "distributed":
        yield f"{here}rollout.transport is {rollout.transport!r}: colocated servers read weights in the trainer's memory"
    if rollout.num_engines * rollout.engine_tp != ranks:
        yield (
            f"{here}rollout.num_engines x rollout.engine_tp is {rollout.num_engines} x {rollout.engine_tp} and "
            f"parallel.ranks is {ranks}: every trainer rank shares its GPU with one rank of a server"
        )
