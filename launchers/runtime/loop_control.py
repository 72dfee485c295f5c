"""What interrupts the training loop, and what times it."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from glm5_next.launchers.phase_watch import unwatched


class StopRequest:
    """Ctrl-C, as the loop sees it: while `waits`, it is only noted, so that the step in progress is finished and saved."""

    def __init__(self) -> None:
        self.requested = False
        self.waits = False

    @contextmanager
    def after_the_step(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


@dataclass(eq=False)
class Timer:
    """Seconds by phase; `watch` hears of every phase."""

    watch: Callable[[str], AbstractContextManager[None]] = unwatched
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        with self.watch(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
