"""What a step measured: the list of metrics, the file they are appended to, and its reader. Needs no torch at import."""

import difflib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from glm5_next.launchers.atomic_write import write_atomic

Value = float | int | None


class Metric(NamedTuple):
    """A key of a step's record and what its value means."""

    name: str
    meaning: str


# Every step's record has all of these; None where a step has nothing to measure (no group left, replay off).
STEP_METRICS = (
    Metric("reward_mean", "mean reward of all samples of the step, dropped groups included"),
    Metric("reward_std", "population standard deviation of those rewards"),
    Metric("response_tokens_mean", "mean response length in tokens"),
    Metric("truncated_fraction", "share of samples that reached max_new_tokens"),
    Metric("groups_sampled", "groups sampled, resampling included"),
    Metric("groups_dropped", "groups left out because their rewards were all equal"),
    Metric("resample_rounds", "extra rounds of sampling to replace dropped groups"),
    Metric("samples_lost", "samples that engines did not deliver in time (their reasons are in rollouts/)"),
    Metric("samples_dropped", "samples that are not trained on: lost, of groups that are too small or equal in reward"),
    Metric("samples_trained", "samples in the update"),
    Metric("tokens_without_record", "response tokens that left the loss because the engine has no record for them"),
    Metric("tokens_trained", "response tokens in the update: the loss's denominator"),
    Metric("micro_batches", "micro-batches per replica, empty ones included"),
    Metric("weights_version", "weight updates behind the policy that sampled this step"),
    Metric("loss", "policy loss per trained token, KL term included"),
    Metric("mismatch_kl_mean", "KL(engine || trainer) per token before the update, k3 estimate, mean"),
    Metric("mismatch_kl_p99", "its 99th percentile"),
    Metric("mismatch_kl_max", "its largest value"),
    Metric("mismatch_abs_mean", "mean |log-probability difference| between engine and trainer"),
    Metric("mismatch_tokens", "tokens compared"),
    Metric("importance_weight_mean", "mean trainer / engine weight after truncation"),
    Metric("expert_overlap", "share of the engine's experts that the trainer's own router chooses too"),
    Metric("replay_reads", "records that layers read in the update, over all ranks; checked against the plan"),
    Metric("entropy", "mean entropy of the policy over trained tokens, in nats"),
    Metric("clip_fraction", "share of trained tokens whose gradient the clip removed"),
    Metric("grad_norm", "gradient norm before clipping"),
    Metric("lr", "learning rate of the update"),
    Metric("tokens_per_second", "tokens of all samples, prompts included, per second of the step"),
    Metric("rollouts_per_second", "samples that came per second of sampling"),
    Metric("seconds_rollout", "time in sampling"),
    Metric("seconds_reward", "time in rewards"),
    Metric("seconds_logprobs", "time in the forward pass before the update"),
    Metric("seconds_train", "time in forward, backward and optimizer"),
    Metric("seconds_sync", "time in sending weights to the engines and checking them"),
    Metric("seconds_checkpoint", "time in writing a checkpoint"),
    Metric("seconds_eval", "time in held-out evaluation"),
    Metric("seconds_step", "wall time of the whole step"),
    Metric("memory_gib", "peak memory of the fullest trainer rank so far (device; resident set on a CPU)"),
)
# A step's record may have these.
EXTRA_METRICS = (
    Metric("start_mismatch_kl_mean", "mismatch_kl_mean over all samples of the start evaluation (step 0)"),
    Metric("start_mismatch_kl_max", "its largest value (step 0)"),
    Metric("start_mismatch_tokens", "tokens compared there: all that were sampled (step 0)"),
    Metric("heldout_reward_start", "mean held-out reward before the first update (in the record of step 0)"),
    Metric("heldout_reward", "mean held-out reward after this step's update"),
    Metric("reference_kl", "mean KL(policy || starting checkpoint) per trained token, k3 estimate"),
)
# Parts of seconds_step, in the order in which a step goes through them.
PHASES = tuple(name for name, _ in STEP_METRICS if name.startswith("seconds_") and name != "seconds_step")


class MetricsLog:
    """Appends one record per step to <run_dir>/metrics.jsonl and, if asked for, to TensorBoard.

    Records of steps from `next_step` on, and a last line torn by a kill, are removed first: a resumed run writes them
    again, and each step is in the file once.
    """

    def __init__(self, run_dir: Path, *, tensorboard: bool, next_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "metrics.jsonl"
        kept = (
            [record for record in read_metrics(self.path) if record["step"] < next_step] if self.path.exists() else []
        )
        write_atomic(self.path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._last_step = kept[-1]["step"] if kept else -1
        self._file = self.path.open("a", encoding="utf-8")
        self._events: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(run_dir / "tensorboard"), purge_step=next_step)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Records a step; a value that is not finite is written as null.

        Raises ValueError that names a metric which is missing, unknown or not a number, and for a step already written.
        """
        if step <= self._last_step:
            raise ValueError(f"metrics of step {step}: step {self._last_step} is already written")
        _check_names(step, values)
        record = {"step": step, **{name: _finite(name, value) for name, value in values.items()}}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._last_step = step
        if self._events is not None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._events.add_scalar(_tag(name), value, step)
            self._events.flush()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, oldest first, each with its `step`.

    A last line without its line end (a running or killed writer) is left out. Raises ValueError that names file and
    line for any other line that is no record, and where steps do not increase.
    """
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not valid JSON ({error})") from None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ValueError(f"{path}:{number}: no record of a step")
        if records and record["step"] <= records[-1]["step"]:
            raise ValueError(f"{path}:{number}: step {record['step']} comes after step {records[-1]['step']}")
        records.append(record)
    return records


def _check_names(step: int, values: Mapping[str, Value]) -> None:
    required = [name for name, _ in STEP_METRICS]
    known = required + [name for name, _ in EXTRA_METRICS]
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"metrics of step {step}: missing {', '.join(missing)}")
    for name in values:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"metrics of step {step}: unknown metric {name!r}; the nearest is {nearest!r}")


def _finite(name: str, value: Value) -> Value:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"metric {name!r} must be a number or None, got {value!r}")
    return value if math.isfinite(value) else None


def _tag(name: str) -> str:
    """TensorBoard groups by the part before the slash."""
    group = "seconds" if name.startswith("seconds_") else name.partition("_")[0]
    return f"{group}/{name}"
