"""One training run from its settings to its results on disk: folders, signals, records, plots, export."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console

from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.config import RunConfig, describe, load_run_config
from glm5_next.launchers.metrics import MetricsLog, read_metrics
from glm5_next.launchers.plots import write_plots
from glm5_next.launchers.progress import Progress
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.checkpoint_folder import STATE_FILE, last_checkpoint
from glm5_next.launchers.runtime.cluster import Cluster
from glm5_next.launchers.runtime.controller import Controller, StopRequest
from glm5_next.launchers.runtime.preflight import Inputs, check_inputs

SETTINGS_FILE = "run.toml"
EXPORT_FOLDER = "export"


@dataclass(frozen=True)
class Outcome:
    """`finished` is False if the run was stopped between two steps; it can be resumed."""

    run_dir: Path
    finished: bool


def start_run(run: RunConfig, *, name: str) -> Outcome:
    """Trains from the checkpoint named in the settings, in a new folder under `output.runs`."""
    run = run.model_copy(update={"model": run.model.model_copy(update={"checkpoint": run.model.checkpoint.resolve()})})
    inputs = check_inputs(run)
    run_id = run.output.run_id or f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = (run.output.runs / run_id).resolve()
    if run_dir.exists():
        raise ValueError(
            f"{run_dir}: exists already; continue it with --resume {run_dir} or choose another output.run_id"
        )
    run_dir.mkdir(parents=True)
    write_atomic(run_dir / SETTINGS_FILE, describe(run).encode())
    state = RunState(
        next_step=0, weights_version=0, prompt_cursor=0, seed=run.train.seed, prompts_digest=inputs.prompts_digest
    )
    return _run(run, inputs, run_dir, state, checkpoint=None)


def resume_run(run_dir: Path, overrides: list[str]) -> Outcome:
    """Continues a run from its newest finished checkpoint, with its own settings and `overrides` on top."""
    if not (run_dir / SETTINGS_FILE).is_file():
        raise ValueError(f"{run_dir / SETTINGS_FILE}: no such file; --resume takes the folder of a run")
    run_dir = run_dir.resolve()  # ranks and engines run elsewhere
    run = load_run_config(run_dir / SETTINGS_FILE, None, overrides)
    checkpoint = last_checkpoint(run_dir)
    if checkpoint is None:
        raise ValueError(f"{run_dir / 'checkpoints'}: holds no finished checkpoint to resume from")
    state = RunState.load(checkpoint / STATE_FILE)
    inputs = check_inputs(run)
    if state.prompts_digest != inputs.prompts_digest:
        raise ValueError(f"data.prompts ({run.data.prompts}) is not what {run_dir} was trained on so far")
    if state.next_step >= run.train.steps:
        raise ValueError(f"{run_dir}: all {run.train.steps} steps are done; raise train.steps with --set to go on")
    write_atomic(run_dir / SETTINGS_FILE, describe(run).encode())
    return _run(run, inputs, run_dir, state, checkpoint)


def _run(run: RunConfig, inputs: Inputs, run_dir: Path, state: RunState, checkpoint: Path | None) -> Outcome:
    console = Console()
    console.print(f"run folder: {run_dir}", highlight=False, soft_wrap=True)
    console.print(f"starting {run.parallel.ranks} trainer rank(s) and {run.rollout.num_engines} engine(s) ...")
    with Cluster(run) as cluster, _stop_on_signal(console) as stop:
        if checkpoint is not None:
            cluster.train("load", checkpoint)
            console.print(f"resumed from {checkpoint} at step {state.next_step}", highlight=False, soft_wrap=True)
        controller = Controller(run, inputs, cluster, run_dir, state)
        log = MetricsLog(run_dir, tensorboard=run.output.tensorboard, next_step=state.next_step)
        with log, Progress(run.train.steps, console=console) as progress:
            controller.loop(log, progress, stop)
        finished = controller.state.next_step == run.train.steps
        if finished:
            controller.export(run_dir / EXPORT_FOLDER)
    if run.output.plots:
        write_plots(log.path, run_dir / "plots")
    _report(console, run_dir, finished)
    return Outcome(run_dir, finished)


@contextmanager
def _stop_on_signal(console: Console) -> Iterator[StopRequest]:
    """The first Ctrl-C (or SIGTERM) asks the loop to stop after its step; the second one interrupts."""
    stop = StopRequest()

    def on_signal(number: int, frame: object) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        console.print("stopping after this step, with a checkpoint; once more to stop at once")

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(console: Console, run_dir: Path, finished: bool) -> None:
    records = read_metrics(run_dir / "metrics.jsonl")
    rewards = [record["reward_mean"] for record in records[-5:]]
    heldout = [record["heldout_reward"] for record in records if record.get("heldout_reward") is not None]
    lines = []
    if rewards:
        lines.append(f"mean reward of the last {len(rewards)} steps: {sum(rewards) / len(rewards):.3f}")
    if heldout:
        lines.append(
            f"held-out reward: {records[0].get('heldout_reward_start', float('nan')):.3f} -> {heldout[-1]:.3f}"
        )
    lines += [f"plots:          {run_dir / 'plots'}", f"TensorBoard:    tensorboard --logdir {run_dir / 'tensorboard'}"]
    if finished:
        lines.append(f"trained model:  {run_dir / EXPORT_FOLDER}")
    else:
        lines.append(f"stopped; continue with: glm5-next train --resume {run_dir}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
