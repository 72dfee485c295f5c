"""Where a run stands: `RunState`, saved with every checkpoint and the only source of truth on resume. Needs no torch."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from glm5_next.launchers.atomic_write import write_atomic


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run between two steps. Everything that decides what comes next, and counters that must not restart at 0.

    next_step: the step that runs next; steps count from 0.
    weights_version: weight updates behind the current policy.
    prompt_cursor: prompts drawn since the run began (`PromptCursor`).
    seed: the run's seed; `step_seed` derives all others.
    prompts_digest: of the training prompts (`prompts.digest`); other data cannot be resumed on.
    samples_drawn: samples asked for so far; each was either trained on or dropped.
    samples_trained, samples_dropped: their parts. dropped_by_reason: the parts of samples_dropped.
    """

    next_step: int
    weights_version: int
    prompt_cursor: int
    seed: int
    prompts_digest: str
    samples_drawn: int = 0
    samples_trained: int = 0
    samples_dropped: int = 0
    dropped_by_reason: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "dropped_by_reason":
                if not isinstance(value, dict) or not all(type(count) is int for count in value.values()):
                    raise ValueError(f"dropped_by_reason must be whole numbers by reason, got {value!r}")
                continue
            if item.type is str:
                if not isinstance(value, str):
                    raise ValueError(f"{item.name} must be a text, got {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{item.name} must be a whole number of at least 0, got {value!r}")
        if self.samples_drawn != self.samples_trained + self.samples_dropped:
            raise ValueError(
                f"samples_drawn ({self.samples_drawn}) is not samples_trained ({self.samples_trained}) "
                f"+ samples_dropped ({self.samples_dropped})"
            )
        if sum(self.dropped_by_reason.values()) != self.samples_dropped:
            raise ValueError(
                f"dropped_by_reason {self.dropped_by_reason} is not samples_dropped ({self.samples_dropped})"
            )

    def save(self, path: Path) -> None:
        """Writes JSON; a crash leaves the old file or the new one."""
        write_atomic(path, (json.dumps(asdict(self), indent=2) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> "RunState":
        """Reads what `save` wrote. Raises ValueError that names the file and the missing, extra or wrong key."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError("expected a JSON object")
            names = {field.name for field in fields(cls)}
            missing, extra = sorted(names - set(values)), sorted(set(values) - names)
            if missing or extra:
                raise ValueError(f"missing keys {missing}, unknown keys {extra}")
            return cls(**values)
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise ValueError(f"{path}: not a run state ({error})") from None


def step_seed(seed: int, step: int, stream: str) -> int:
    """A seed in [0, 2**32) for one purpose ("rollout", "rollout/engine-1") in one step; the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}/{stream}".encode()).digest()[:4], "little")
