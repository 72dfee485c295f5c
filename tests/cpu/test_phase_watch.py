"""A phase that takes long says what it waits for; a short one says nothing."""

import time

from glm5_next.launchers.phase_watch import PATIENCE, PhaseWatch


def test_a_phase_that_takes_long_says_what_it_waits_for_again_and_again():
    said: list[str] = []
    watch = PhaseWatch(said.append, lambda: "no answer to train from trainer rank 1", patience=0.2)
    with watch.phase("train"):
        limit = time.monotonic() + 20.0
        while len(said) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
    watch.close()
    assert len(said) >= 2
    assert all(line.startswith("train has taken ") and "trainer rank 1" in line for line in said)


def test_short_phases_say_nothing_however_many_there_are():
    said: list[str] = []
    watch = PhaseWatch(said.append, lambda: "", patience=30.0)
    for _ in range(50):
        with watch.phase("reward"):
            pass
    watch.close()
    assert not said and PATIENCE == 30.0
