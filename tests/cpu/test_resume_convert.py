"""Killed at any moment and run again, a conversion writes the bytes that it would have written undisturbed."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from glm5_next.bridge import conversion, dist_write, pieces, shards, to_hf, to_megatron
from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.conversion import Options
from glm5_next.bridge.pieces import Share
from glm5_next.bridge.slice import slice_checkpoint
from glm5_next.bridge.tiny_checkpoint import write_tiny_checkpoint
from glm5_next.launchers.runtime import convert
from glm5_next.launchers.runtime.checkpoint_folder import MARKER, check_finished
from glm5_next.launchers.runtime.convert import hf_to_megatron, megatron_to_hf

ONE_THREAD = Options(workers=1)
Task = Callable[[Path], object]


@pytest.fixture(scope="module", autouse=True)
def small_pieces():
    with mock.patch.object(conversion, "PIECE_BYTES", 120_000):
        yield


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("source") / "hf", layers=4, experts=4, fp8=True)


@pytest.fixture(scope="module")
def checkpoint(source) -> Path:
    hf_to_megatron(source, source.parent / "megatron", ONE_THREAD)
    return source.parent / "megatron"


TASKS = {
    "to_megatron": lambda source, checkpoint: lambda out, options: hf_to_megatron(source, out, options),
    "to_hf": lambda source, checkpoint: lambda out, options: megatron_to_hf(checkpoint, out, None, options=options),
    "slice": lambda source, checkpoint: (
        lambda out, options: slice_checkpoint(Checkpoint(source), out, layers=3, options=options)
    ),
}


@pytest.fixture(params=TASKS)
def task(request, source, checkpoint) -> Task:
    run = TASKS[request.param](source, checkpoint)
    return lambda out: run(out, ONE_THREAD)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def in_a_process(task: Task, out: Path, kill_at: int | None) -> int:
    """Runs the task in a forked process that kills itself right after the n-th thing it does to the disk.

    Returns how many it did; of a killed process `kill_at`.
    """
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        try:
            done = counted(task, out, kill_at)
            os.write(send, str(done).encode())
        finally:
            os._exit(0)
    os.close(send)
    _, status = os.waitpid(child, 0)
    answer = os.read(receive, 100)
    os.close(receive)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL and kill_at is not None
        return kill_at
    assert answer, "the task failed"
    return int(answer)


def counted(task: Task, out: Path, kill_at: int | None) -> int:
    done = 0

    def then_die(function):
        def wrapped(*args, **kwargs):
            nonlocal done
            result = function(*args, **kwargs)
            done += 1
            if done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    places = [
        *((module, "flush") for module in (convert, pieces, to_hf, to_megatron)),
        *((module, "copy_range") for module in (shards, dist_write)),
        (shards, "transfer"),
        (to_megatron, "write_tensor"),
        (os, "fsync"),
        (os, "ftruncate"),
        (Path, "rename"),
        (Path, "write_text"),
        (Path, "touch"),
        (shutil, "copyfile"),
    ]
    for owner, name in places:
        setattr(owner, name, then_die(getattr(owner, name)))
    task(out)
    return done


def test_a_kill_at_any_point_costs_nothing_but_time(task, tmp_path):
    count = in_a_process(task, tmp_path / "whole", None)
    expected = contents(tmp_path / "whole")
    assert count > 60 and len(list((tmp_path / "whole").glob("*.distcp"))) != 1, "too few pieces to test anything"
    for number, kill_at in enumerate(
        sorted({*range(1, count, max(1, count // 8)), count - 4, count - 3, count - 2, count - 1, count})
    ):
        out = tmp_path / f"killed-{kill_at}"
        assert in_a_process(task, out, kill_at) == kill_at
        if (out / MARKER).exists():
            assert contents(out).items() >= expected.items()
        elif out.exists() and (tmp_path / "whole" / MARKER).exists():
            with pytest.raises(ValueError, match="has no COMPLETE marker"):
                check_finished(out)
        if number % 3 == 0:  # and once more, early in what is left
            in_a_process(task, out, 5)
        in_a_process(task, out, None)
        assert contents(out) == expected, kill_at
        assert not out.with_name(f".{out.name}.unfinished").exists()
        shutil.rmtree(out)


def test_what_is_done_is_not_done_again(task, tmp_path):
    count = in_a_process(task, tmp_path / "whole", None)
    in_a_process(task, tmp_path / "out", count * 3 // 4)
    assert in_a_process(task, tmp_path / "out", None) < count * 2 // 3
    assert in_a_process(task, tmp_path / "out", None) < 5, "a finished output is worked on"


def test_a_damaged_record_would_show(task, tmp_path):
    """The control: a piece that is said to be there and is not makes another output."""
    count = in_a_process(task, tmp_path / "whole", None)
    in_a_process(task, tmp_path / "out", count // 2)
    unfinished = tmp_path / ".out.unfinished"
    for path in unfinished.iterdir():
        if path.suffix == ".safetensors" or path.name.endswith(".distcp"):
            path.write_bytes(bytes(path.stat().st_size))
    in_a_process(task, tmp_path / "out", None)
    assert contents(tmp_path / "out") != contents(tmp_path / "whole")


def test_every_file_is_on_disk_before_the_folder_takes_its_name(task, tmp_path, monkeypatch):
    synced, renamed = set(), []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        return fsync(descriptor)

    def note_rename(path, target):
        if Path(target) == tmp_path / "out":
            renamed.append(
                [file.name for file in path.iterdir() if file.stat().st_ino not in synced and file.is_file()]
            )
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    task(tmp_path / "out")
    assert renamed == [[]]


def refused(function, *args, **kwargs) -> str:
    with pytest.raises(ValueError) as error:
        function(*args, **kwargs)
    return str(error.value)


@pytest.mark.parametrize("at", [0.5, None], ids=["unfinished", "finished"])
def test_other_settings_on_the_same_output_are_refused_by_name(source, checkpoint, tmp_path, at):
    out = tmp_path / "out"
    count = in_a_process(
        lambda out: megatron_to_hf(checkpoint, out, None, options=ONE_THREAD), tmp_path / "count", None
    )
    in_a_process(
        lambda out: megatron_to_hf(checkpoint, out, None, options=ONE_THREAD), out, None if at is None else count // 2
    )
    before = contents(tmp_path)
    assert "dtype was 'source' and is now 'bfloat16'" in refused(megatron_to_hf, checkpoint, out, None, "bfloat16")
    assert "conversion was 'Megatron to Hugging Face' and is now" in refused(hf_to_megatron, source, out)
    other = shutil.copytree(source, tmp_path.parent / f"{tmp_path.name}-moved")
    assert f"source was '{source}' and is now '{other}'" in refused(megatron_to_hf, checkpoint, out, other)
    assert contents(tmp_path) == before


def test_an_input_that_changed_is_named(source, tmp_path):
    own = shutil.copytree(source, tmp_path / "hf")
    count = in_a_process(lambda out: hf_to_megatron(own, out, ONE_THREAD), tmp_path / "count", None)
    in_a_process(lambda out: hf_to_megatron(own, out, ONE_THREAD), tmp_path / "out", count // 2)
    shard = sorted(own.glob("*.safetensors"))[2]
    os.utime(shard, ns=(0, 0))
    assert f"with other inputs: {shard.name} was" in refused(hf_to_megatron, own, tmp_path / "out")


@pytest.mark.parametrize("name", TASKS)
def test_shares_of_several_processes_make_the_same_output(name, tmp_path, source, checkpoint):
    run = TASKS[name](source, checkpoint)
    run(tmp_path / "whole", ONE_THREAD)
    shares = [Options(workers=1, share=Share.parse(f"{number}/3")) for number in range(3)]
    reports = [run(tmp_path / "out", options) for options in shares]
    assert [report.is_finished for report in reports] == [False, False, True]
    assert all(report.written_pieces for report in reports)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_manifest_names_inputs_settings_and_stays_in_the_output(task, tmp_path):
    task(tmp_path / "out")
    manifest = json.loads((tmp_path / "out/.conversion/manifest.json").read_text())
    assert {"settings", "inputs"} == manifest.keys() and manifest["settings"]["pieces"] > 1
    assert all(len(entry) == 2 for entry in manifest["inputs"].values())
    assert [path.name for path in (tmp_path / "out/.conversion").iterdir()] == ["manifest.json"]
