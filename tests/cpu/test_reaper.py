"""What a driver starts does not outlive it, whether it ends, is interrupted while it starts, or is killed."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from glm5_next.launchers.runtime import reaper

# Prints the processes it has started: one in a session of its own, which starts another and goes away.
DRIVER = """
import subprocess, sys, time
from glm5_next.launchers.runtime.reaper import Reaper
reaper = Reaper()
middle = "import subprocess; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); input()"
child = subprocess.Popen([sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True, start_new_session=True)
print(child.pid, child.stdout.readline().strip(), flush=True)
word = input()
if word == "orphan":
    time.sleep(2)
    child.kill()
    child.wait()
if word == "started":
    reaper.all_started()
print("ready", flush=True)
input()
reaper.close()
print("closed", flush=True)
"""


@pytest.fixture
def driver():
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    yield process
    process.kill()
    process.wait()


def say(driver: subprocess.Popen, word: str) -> None:
    assert driver.stdin is not None
    driver.stdin.write(f"{word}\n")


def hear(driver: subprocess.Popen) -> str:
    assert driver.stdout is not None
    return driver.stdout.readline().strip()


def expect_gone(pids: list[int]) -> None:
    limit = time.monotonic() + 15
    while alive := [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:
        assert time.monotonic() < limit, f"alive: {alive}"
        time.sleep(0.05)


@pytest.mark.parametrize("word", ["started", "starting", "orphan"])
@pytest.mark.parametrize("ending", ["close", "kill"])
def test_nothing_outlives_the_driver(driver, word, ending):
    pids = [int(pid) for pid in hear(driver).split()]
    say(driver, word)
    assert hear(driver) == "ready"
    assert psutil.pid_exists(pids[-1])
    if ending == "close":
        say(driver, "")
        assert hear(driver) == "closed"
    else:
        time.sleep(1)  # a look of the reaper, where it still looks
        driver.send_signal(signal.SIGKILL)
    expect_gone(pids)
    driver.wait()


BYSTANDER = """
import subprocess
from glm5_next.launchers.runtime.reaper import Reaper
bystander = subprocess.Popen(["sleep", "1000"])
reaper = Reaper()
child = subprocess.Popen(["sleep", "1000"])
reaper.close()
print(bystander.poll(), child.wait(), flush=True)
bystander.kill()
"""


def test_what_the_driver_had_started_before_is_left_alone():
    result = subprocess.run([sys.executable, "-c", BYSTANDER], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["None", str(-signal.SIGKILL)]


def test_a_watch_for_a_driver_that_is_gone_does_nothing():
    """Its parent is then another process, perhaps the first of the system: everything is below that one."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    bystander = subprocess.Popen(["sleep", "1000"])
    for number in (ended.pid, bystander.pid, os.getppid()):
        watch = [sys.executable, reaper.__file__, str(number)]
        result = subprocess.run(
            watch, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
        )
        assert result.stdout == ""
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
