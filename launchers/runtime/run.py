"""One training run from its settings to its results on disk: folders, signals, records, plots, export."""

import fcntl
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from glm5_next.launchers.atomic_write import write_atomic
from glm5_next.launchers.config import RunConfig, describe, load_run_config, with_absolute_paths
from glm5_next.launchers.failures import RunFailed
from glm5_next.launchers.metrics import MetricsLog
from glm5_next.launchers.phase_watch import PhaseWatch
from glm5_next.launchers.progress import Progress
from glm5_next.launchers.run_report import results
from glm5_next.launchers.run_state import RunState
from glm5_next.launchers.runtime.checkpoint_folder import STATE_FILE, last_checkpoint
from glm5_next.launchers.runtime.cluster import Cluster
from glm5_next.launchers.runtime.controller import Controller
from glm5_next.launchers.runtime.loop_control import StopRequest
from glm5_next.launchers.runtime.preflight import Inputs, check_inputs

SETTINGS_FILE = "run.toml"
METRICS_FILE = "metrics.jsonl"
ERROR_FILE = "error.log"
EXPORT_FOLDER = "export"
# Backends of other packages whose kernels take long the first time.
COMPILED_ON_FIRST_USE = frozenset({"fla", "cudnn", "flash_mla", "tilelang"})


@dataclass(frozen=True)
class Outcome:
    """`finished` is False if the run was stopped; it can be resumed."""

    run_dir: Path
    finished: bool


def start_run(run: RunConfig, *, name: str) -> Outcome:
    """Trains from the checkpoint named in the settings, in a new folder under `output.runs`."""
    run = with_absolute_paths(run)
    inputs = check_inputs(run)
    run_id = run.output.run_id or f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    run_dir = (run.output.runs / run_id).resolve()
    if run_dir.exists():
        raise ValueError(
            f"{run_dir}: exists already; continue it with --resume {run_dir} or choose another output.run_id"
        )
    run_dir.mkdir(parents=True)
    write_atomic(run_dir / SETTINGS_FILE, describe(run).encode())
    with _only_here(run_dir):
        try:
            return _run(run, inputs, run_dir, _first_state(run, inputs), checkpoint=None)
        except ValueError:  # found by a rank or an engine: bad input leaves nothing behind
            shutil.rmtree(run_dir)
            raise


def resume_run(run_dir: Path, overrides: list[str]) -> Outcome:
    """Continues a run from its newest finished checkpoint, with its own settings and `overrides` on top.

    A run that was stopped before its first checkpoint starts again.
    """
    if not (run_dir / SETTINGS_FILE).is_file():
        raise ValueError(f"{run_dir / SETTINGS_FILE}: no such file; --resume takes the folder of a run")
    run_dir = run_dir.resolve()  # ranks and engines run elsewhere
    with _only_here(run_dir):
        return _resume_here(run_dir, overrides)


def _resume_here(run_dir: Path, overrides: list[str]) -> Outcome:
    run = with_absolute_paths(load_run_config(run_dir / SETTINGS_FILE, None, overrides))
    inputs = check_inputs(run)
    checkpoint = last_checkpoint(run_dir)
    state = _first_state(run, inputs) if checkpoint is None else RunState.load(checkpoint / STATE_FILE)
    if state.prompts_digest != inputs.prompts_digest:
        raise ValueError(f"data.prompts ({run.data.prompts}) is not what {run_dir} was trained on so far")
    if state.seed != run.train.seed:
        raise ValueError(f"train.seed is {run.train.seed}, but {run_dir} was started with {state.seed}")
    if state.next_step >= run.train.steps and (run_dir / EXPORT_FOLDER).exists():
        raise ValueError(f"{run_dir}: all {run.train.steps} steps are done; raise train.steps with --set to go on")
    write_atomic(run_dir / SETTINGS_FILE, describe(run).encode())
    return _run(run, inputs, run_dir, state, checkpoint)


def _run(run: RunConfig, inputs: Inputs, run_dir: Path, state: RunState, checkpoint: Path | None) -> Outcome:
    """Raises RunFailed for whatever goes wrong, except for a ValueError before the first step: that is bad input."""
    console = Console(highlight=False, soft_wrap=True)
    cluster = Cluster(run, run_dir, inputs.checkpoint.config)
    controller = Controller(run, inputs, cluster, run_dir, state)
    (run_dir / ERROR_FILE).unlink(missing_ok=True)
    try:
        with _stop_on_signal(console) as stop:
            console.print(f"run folder: {run_dir}")
            console.print(inputs.replay_cost(run))
            _train(controller, checkpoint, stop, console)
        if run.output.plots and controller.state.next_step:
            from glm5_next.launchers.plots import write_plots

            write_plots(run_dir / METRICS_FILE, run_dir / "plots")
    except KeyboardInterrupt:
        return _stopped(console, run_dir, controller)
    except Exception as error:
        if isinstance(error, ValueError) and not controller.begun:
            raise
        raise _failed(error, run_dir, controller) from None
    _report(console, run_dir, finished=controller.done)
    return Outcome(run_dir, finished=controller.done)


def _train(controller: Controller, checkpoint: Path | None, stop: StopRequest, console: Console) -> None:
    run, run_dir, started = controller.run, controller.run_dir, time.monotonic()
    watch = PhaseWatch(console.print, controller.cluster.status)
    controller.watch = watch.phase
    console.print(f"starting {run.parallel.ranks} trainer rank(s) and {run.rollout.num_engines} engine(s) ...")
    with ExitStack() as stack:
        stack.callback(watch.close)
        with watch.phase("start"):
            cluster = stack.enter_context(controller.cluster)
        processes = ", ".join(f"{name} is {number}" for name, number in cluster.process_ids.items())
        console.print(f"started in {time.monotonic() - started:.0f} seconds; processes: {processes}")
        if cluster.unused_gpus:
            console.print(
                f"on CPUs: parallel.ranks is {run.parallel.ranks} and Ray has {cluster.unused_gpus} GPU(s), which stay unused "
                "(preset tiny-gpu trains on one)"
            )
        _print_backends(cluster.train("backends")[0], console)
        if checkpoint is not None:
            cluster.train("load", checkpoint)
            console.print(f"resumed from {checkpoint} at step {controller.state.next_step + 1}")
        log = MetricsLog(run_dir, tensorboard=run.output.tensorboard, next_step=controller.state.next_step)
        with log, Progress(run.train.steps, console=console) as progress:
            controller.loop(log, progress, stop)
        if controller.done:
            with watch.phase("export"):
                controller.export(run_dir / EXPORT_FOLDER)


def _print_backends(backends: Mapping[str, str], console: Console) -> None:
    console.print("backends: " + ", ".join(f"{name} {backend}" for name, backend in backends.items()))
    if not COMPILED_ON_FIRST_USE.isdisjoint(backends.values()):
        console.print(
            "kernels are compiled on first use, and on other cards than Hopper tuned: the first step can take minutes (later "
            "runs find the results in Triton's cache, ~/.triton)"
        )


def _first_state(run: RunConfig, inputs: Inputs) -> RunState:
    return RunState(
        next_step=0, weights_version=0, prompt_cursor=0, seed=run.train.seed, prompts_digest=inputs.prompts_digest
    )


@contextmanager
def _only_here(run_dir: Path) -> Iterator[None]:
    """Two processes that continue the same run would write the same files. The lock ends with this process."""
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{run_dir}: another process is running it") from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(folder)


@contextmanager
def _stop_on_signal(console: Console) -> Iterator[StopRequest]:
    """The first Ctrl-C (or SIGTERM) lets a step in progress end and be saved; without one, and the next time, it stops.

    Python drops an exception that is raised where none can be handled, as between a fork and its process, of which a
    start has many; the signal is then sent again.
    """
    stop = StopRequest()
    ignored = sys.unraisablehook

    def on_signal(number: int, frame: object) -> None:
        if stop.requested or not stop.waits:
            raise KeyboardInterrupt
        stop.requested = True
        console.print("stopping after this step, with a checkpoint; once more to stop at once")

    def on_ignored(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            ignored(unraisable)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.unraisablehook = on_ignored
    try:
        yield stop
    finally:
        sys.unraisablehook = ignored
        for number, handler in before.items():
            signal.signal(number, handler)


def _stopped(console: Console, run_dir: Path, controller: Controller) -> Outcome:
    """Stopped at once: what was not in a checkpoint is lost."""
    console.print(f"stopped at once, {controller.state.next_step - controller.saved_step} finished step(s) unsaved")
    console.print(_how_to_continue(run_dir))
    return Outcome(run_dir, finished=False)


def _failed(error: Exception, run_dir: Path, controller: Controller) -> RunFailed:
    write_atomic(run_dir / ERROR_FILE, traceback.format_exc().encode())
    step = controller.step_in_progress
    where = "" if step is None else f"step {step + 1} of {controller.run.train.steps}: "
    text = str(error) if isinstance(error, (RuntimeError, ValueError)) else f"{type(error).__name__}: {error}"
    return RunFailed(f"{where}{text}\n{_how_to_continue(run_dir)}\ntraceback: {run_dir / ERROR_FILE}")


def _how_to_continue(run_dir: Path) -> str:
    return f"continue with: glm5-next train --resume {run_dir}"


def _report(console: Console, run_dir: Path, *, finished: bool) -> None:
    last = f"trained model:  {run_dir / EXPORT_FOLDER}" if finished else f"stopped; {_how_to_continue(run_dir)}"
    for line in (
        *results(run_dir / METRICS_FILE),
        f"plots:          {run_dir / 'plots'}",
        f"TensorBoard:    tensorboard --logdir {run_dir / 'tensorboard'}",
        last,
    ):
        console.print(line)
