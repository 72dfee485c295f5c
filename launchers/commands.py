"""What each command of the command line does, with everything it has to import."""

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from glm5_next.launchers import tiny_task
from glm5_next.launchers.config import RunConfig, describe, load_run_config
from glm5_next.launchers.cpu_process import use_cpu
from glm5_next.launchers.presets import find_preset
from glm5_next.launchers.presets import preset as preset_values
from glm5_next.plugins.config import Glm5NextConfig

console = Console(highlight=False, soft_wrap=True)


def train(preset: str | None, config: Path | None, overrides: list[str]) -> bool:
    """Runs a new training run; returns whether it finished."""
    run = _settings(preset, config, overrides)
    _say_baselines(run)
    from glm5_next.launchers.runtime.run import start_run

    return start_run(run, name=preset or "run").finished


def resume(run_dir: Path, overrides: list[str]) -> bool:
    """Continues a run; returns whether it finished."""
    from glm5_next.launchers.runtime.run import resume_run

    return resume_run(run_dir, overrides).finished


def dry_run(preset: str | None, config: Path | None, overrides: list[str]) -> bool:
    """Prints settings and plan, then checks the inputs and says what they are."""
    run = _settings(preset, config, overrides)
    console.print(describe(run), markup=False)
    from glm5_next.launchers.runtime.preflight import check_inputs

    print_plan(run, _model(run, preset))
    if not run.model.checkpoint.exists() and _is_for_a_cluster(preset):
        raise ValueError(
            f"model.checkpoint: {run.model.checkpoint} does not exist; glm5-next prepare --preset {preset} makes it"
        )
    inputs = check_inputs(run)
    console.print(f"longest prompt: {inputs.longest_prompt} tokens; {len(inputs.heldout)} held-out prompts")
    console.print(inputs.replay_cost(run))
    _say_baselines(run)
    return True


def print_plan(run: RunConfig, model: Glm5NextConfig) -> None:
    """Which layers and experts every trainer rank holds; ranks that hold the same number of them in one line."""
    topology = run.parallel.topology()
    topology.check_model(model)
    table = Table("ranks", "pipeline stage: layers", "experts a rank", title="plan")
    stages = topology.layers_per_stage(model.num_layers)
    size = topology.world_size // topology.pp
    for stage in range(topology.pp):
        ranks = f"{stage * size}-{(stage + 1) * size - 1}" if size > 1 else str(stage)
        layers = "; ".join(_span(stages[stage + chunk * topology.pp]) for chunk in range(topology.vpp or 1))
        table.add_row(ranks, f"{stage}: {layers}", f"{model.num_experts // topology.ep} of {model.num_experts}")
    console.print(table)
    if run.rollout.placement == "colocated":
        servers, tp = run.rollout.num_engines, run.rollout.engine_tp
        console.print(f"{servers} server(s) of {tp} GPU(s) on those of the trainer ranks, asleep while these compute")


def tiny_checkpoint(out: Path, *, seed: int, warm_up_steps: int, sizes: dict[str, Any]) -> None:
    """Writes a random checkpoint, warmed up on the form of an answer unless `warm_up_steps` is 0."""
    from glm5_next.bridge.hf_folder import staged_folder
    from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint

    if warm_up_steps == 0:
        write_tiny_checkpoint(out, seed=seed, **sizes)
    else:
        with staged_folder(out):  # refuses a folder that is in use before any work is done
            pass
        with tempfile.TemporaryDirectory() as scratch:
            source = write_tiny_checkpoint(Path(scratch) / "random", seed=seed, **sizes)
            _warm_up(source, out, steps=warm_up_steps, seed=seed)
    console.print(f"wrote {out}")


def _settings(preset: str | None, config: Path | None, overrides: list[str]) -> RunConfig:
    if preset is None and config is None:
        raise ValueError("train needs --preset NAME or --config FILE (try: glm5-next train --preset tiny)")
    return load_run_config(config, None if preset is None else preset_values(preset), overrides)


def _is_for_a_cluster(preset: str | None) -> bool:
    return preset is not None and find_preset(preset).cluster is not None


def _model(run: RunConfig, preset: str | None) -> Glm5NextConfig:
    """What the checkpoint describes, or what a cluster's preset is for where there is none yet."""
    if preset is not None and _is_for_a_cluster(preset) and not run.model.checkpoint.exists():
        return find_preset(preset).released_model()
    return Glm5NextConfig.from_hf(run.model.checkpoint)


def _warm_up(source: Path, out: Path, *, steps: int, seed: int) -> None:
    use_cpu()
    from transformers import AutoTokenizer

    from glm5_next.launchers.runtime.warm_up import warm_up

    tokenizer = AutoTokenizer.from_pretrained(source)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("warm-up", total=steps)
        for loss in warm_up(source, out, steps=steps, seed=seed, tokenizer=tokenizer):
            progress.update(task, advance=1, description=f"warm-up, loss {loss:.3f}")
    console.print(f"warm-up: {steps} supervised steps on the form of an answer, last loss {loss:.3f}")


def _say_baselines(run: RunConfig) -> None:
    if run.data.prompts == "tiny":
        constant = tiny_task.best_constant_reward(tiny_task.training_prompts())
        console.print(
            f"task: the letter after the last one; random answers earn {tiny_task.random_policy_reward():.3f}, "
            f"the best constant answer {constant:.3f}"
        )


def _span(layers: list[int]) -> str:
    return f"{layers[0]}-{layers[-1]}" if layers else "none"
