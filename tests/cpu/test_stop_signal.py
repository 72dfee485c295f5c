"""Ctrl-C reaches the run also where Python ignores exceptions."""

import signal
import sys
import time

import pytest
from rich.console import Console

from glm5_next.launchers.runtime.run import _stop_on_signal

SECONDS = 20.0


class IgnoresWhatItRaises:
    """As hooks between a fork and its process do, which a start of Ray runs often."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def interrupted_inside() -> None:
    IgnoresWhatItRaises()
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        time.sleep(0.01)


def test_an_interrupt_that_was_ignored_comes_again():
    with pytest.raises(KeyboardInterrupt), _stop_on_signal(Console()) as stop:
        interrupted_inside()
    assert not stop.requested


def test_handlers_and_hook_are_put_back():
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    with _stop_on_signal(Console()):
        assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) != before
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


def test_in_a_step_the_first_interrupt_is_noted_and_the_second_stops():
    with pytest.raises(KeyboardInterrupt), _stop_on_signal(Console()) as stop, stop.after_the_step():
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        signal.raise_signal(signal.SIGINT)
