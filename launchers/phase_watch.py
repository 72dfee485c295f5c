"""Says what a run waits for, where one phase of a step takes long. Needs no torch."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 30.0  # seconds in one phase before it is said what is waited for, and between two such lines


class PhaseWatch:
    """`say` gets a line when the innermost open phase has lasted `patience` seconds, and again after as long.

    `status` is asked then, from another thread, and answers in a few words: who has not answered, how far the work is.
    """

    def __init__(self, say: Callable[[str], None], status: Callable[[], str], *, patience: float = PATIENCE):
        self.say, self.status, self.patience = say, status, patience
        self._phases: list[tuple[str, float]] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="phase watch", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append((name, time.monotonic()))
        try:
            yield
        finally:
            self._phases.pop()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(1.0)

    def _look(self) -> None:
        said: tuple[str, float] | None = None
        next_time = 0.0
        while not self._closed.wait(self.patience / 30):
            phases = list(self._phases)
            if not phases:
                continue
            name, start = phases[-1]
            if phases[-1] != said:
                next_time = start + self.patience
                said = phases[-1]
            if time.monotonic() >= next_time:
                next_time += self.patience
                self.say(f"{name} has taken {time.monotonic() - start:.0f} seconds: {self.status()}")


@contextmanager
def unwatched(name: str) -> Iterator[None]:
    """In place of `PhaseWatch.phase`."""
    yield
