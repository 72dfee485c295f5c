"""Everything that can be wrong with a run, found before a process is started or a file is written."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.command import engine_command
from glm5_next.launchers.prompts import PromptCursor, digest, read_prompts
from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.rewards import Reward, check_answers, load_reward
from glm5_next.launchers.runtime.convert import check_conversion
from glm5_next.launchers.runtime.rollout import longest_prompt
from glm5_next.launchers.runtime.transformers_engine import stop_tokens
from glm5_next.launchers.tiny_task import heldout_prompts, training_prompts
from glm5_next.launchers.types import Prompt


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """What a run reads before it starts."""

    checkpoint: Checkpoint
    tokenizer: Any
    prompts: PromptCursor
    prompts_digest: str
    heldout: tuple[Prompt, ...]
    reward: Reward
    longest_prompt: int

    def replay_cost(self, run: RunConfig) -> str:
        """Largest payload of replay per token and per step, for a run to print before it starts."""
        plan = ReplayPlan.of(run.replay, self.checkpoint.config)
        samples = run.rollout.prompts_per_step * run.rollout.samples_per_prompt
        return plan.cost(self.longest_prompt + run.rollout.max_new_tokens - 1, samples)


def check_inputs(run: RunConfig) -> Inputs:
    """Opens and checks model, prompts and reward against each other; raises ValueError that names what is wrong."""
    checkpoint = Checkpoint(run.model.checkpoint)
    checkpoint.check_inventory()
    if run.model.megatron_checkpoint is not None:
        check_conversion(run.model.megatron_checkpoint, checkpoint, run.model.precision)
    run.parallel.topology().check_model(checkpoint.config)
    tokenizer = _tokenizer(run.model.checkpoint)
    stop_tokens(run.model.checkpoint)
    training = training_prompts() if run.data.prompts == "tiny" else read_prompts(Path(run.data.prompts))
    heldout: list[Prompt] = []
    if run.data.heldout is not None:
        heldout = heldout_prompts() if run.data.heldout == "tiny" else read_prompts(Path(run.data.heldout))
    if run.rollout.engine != "transformers" and not run.rollout.urls:
        engine_command(run, checkpoint.config)
    reward = load_reward(run.data.reward)
    check_answers(reward, [*training, *heldout])
    length, prompt_id = longest_prompt(tokenizer, [*training, *heldout])
    if length + run.rollout.max_new_tokens > run.train.tokens_per_micro_batch:
        raise ValueError(
            f"prompt {prompt_id!r} has {length} tokens; with rollout.max_new_tokens = {run.rollout.max_new_tokens} it does "
            f"not fit into train.tokens_per_micro_batch = {run.train.tokens_per_micro_batch}"
        )
    if length + run.rollout.max_new_tokens > checkpoint.config.max_sequence_length:
        raise ValueError(
            f"prompt {prompt_id!r} has {length} tokens; with rollout.max_new_tokens = {run.rollout.max_new_tokens} it is "
            f"longer than the model's max_position_embeddings = {checkpoint.config.max_sequence_length}"
        )
    return Inputs(
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        prompts=PromptCursor(training, run.train.seed, run.data.shuffle),
        prompts_digest=digest(training),
        heldout=tuple(heldout),
        reward=reward,
        longest_prompt=length,
    )


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder / 'tokenizer.json'}: no such file; the checkpoint's tokenizer is needed")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever the libraries behind it raise
        raise ValueError(f"{folder}: its tokenizer cannot be loaded ({type(error).__name__}: {error})") from error
