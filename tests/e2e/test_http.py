"""A whole run with servers: samples and weights over HTTP and a process group; one server dies and another takes over."""

import json
from dataclasses import dataclass

import psutil
import pytest

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.launchers.presets import preset
from tests.e2e.conftest import SECONDS_TO_FINISH, Ended, Workplace, end_of, wait_for_steps
from tests.support.cli_run import running

SETTINGS = (
    "model.checkpoint=tiny-checkpoint",
    "output.run_id=http",
    "data.prompts=prompts.jsonl",
    "data.heldout=none",
    "data.reward=grader:spread",
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=4",
    "grpo.drop_zero_spread=false",
    "optimizer.lr=1e-3",
    "train.steps=3",
    "train.eval_every=0",
    "train.checkpoint_every=0",
)


@dataclass(frozen=True)
class Watched:
    """A run, and what was seen of it while it lasted."""

    ended: Ended
    key: str
    commands: list[list[str]]
    listening: list[str]


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def watched(workplace: Workplace) -> Watched:
    """Engine 0 is held still in step 2, so that requests wait for it, and then killed."""
    run_dir = workplace.run_dir("http")
    words = (word for setting in SETTINGS for word in ("--set", setting))
    with running(workplace.folder, "train", "--preset", "tiny-http", *words) as run:
        wait_for_steps(run, run_dir, 1)
        server = run.process_of("engine 0")
        server.suspend()
        key = server.environ()["VLLM_API_KEY"]
        commands = [process.cmdline() for process in run.processes()]
        listening = [connection.laddr.ip for connection in server.net_connections() if connection.status == "LISTEN"]
        server.kill()
        psutil.wait_procs([server], timeout=5)
        return Watched(end_of(run, run_dir, SECONDS_TO_FINISH), key, commands, listening)


def test_the_run_goes_on_with_the_engine_that_is_left_and_starts_the_other_again(watched: Watched):
    ended = watched.ended
    assert ended.code == 0, ended.output
    assert [record["step"] for record in ended.records] == [0, 1, 2]
    assert (ended.run_dir / "engine-0.log").read_text().count("listening on http://127.0.0.1:") == 2
    assert (ended.run_dir / "engine-1.log").read_text().count("listening on http://127.0.0.1:") == 1


def test_no_finished_sample_is_lost(watched: Watched):
    ended = watched.ended
    state = json.loads((ended.run_dir / "checkpoints/step-000003/run_state.json").read_text())
    assert state["samples_drawn"] == state["samples_trained"] + sum(state["dropped_by_reason"].values())
    assert state["samples_trained"] == sum(record["samples_trained"] for record in ended.records)
    lines = [
        json.loads(line)
        for step in range(3)
        for line in (ended.run_dir / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()
    ]
    assert len(lines) == state["samples_drawn"]


def test_engine_and_trainer_agree_over_http(watched: Watched):
    first = watched.ended.records[0]
    assert first["start_mismatch_kl_mean"] <= 1e-8
    assert all(record["expert_overlap"] > 0.999 for record in watched.ended.records)
    assert [record["weights_version"] for record in watched.ended.records] == [0, 1, 2]


def check_reads(ended: Ended, workplace: Workplace) -> None:
    """Experts and picks are read in the same number of passes."""
    model = Checkpoint(workplace.folder / "tiny-checkpoint").config
    experts, picks = model.mlp_kinds.count("moe"), model.attention_kinds.count("dsa")
    for record in ended.records:
        passes, rest = divmod(record["replay_reads"], experts + picks)
        assert passes > 0 and not rest, f"{record['replay_reads']} reads of {experts} and {picks} layers"


def test_experts_and_picks_of_the_servers_are_replayed_in_every_pass(watched: Watched, workplace: Workplace):
    check_reads(watched.ended, workplace)


def launched(workplace: Workplace, name: str, launch: list[str], *settings: str) -> Ended:
    """A run with servers that are started by other words."""
    changed = (*SETTINGS, f"output.run_id={name}", f"rollout.launch={json.dumps(launch)}", *settings)
    words = (word for setting in changed for word in ("--set", setting))
    with running(workplace.folder, "train", "--preset", "tiny-http", *words) as run:
        return end_of(run, workplace.run_dir(name), SECONDS_TO_FINISH)


def test_picks_come_over_the_other_protocol_as_well(workplace: Workplace):
    launch = [word.replace("sglang", "vllm") for word in preset("tiny-http")["rollout"]["launch"]]
    ended = launched(workplace, "vllm", launch, "rollout.engine=vllm", "rollout.transport=disk", "train.steps=1")
    assert ended.code == 0, ended.output
    assert ended.records[0]["start_mismatch_kl_mean"] <= 1e-8 and ended.records[0]["expert_overlap"] > 0.999
    check_reads(ended, workplace)


def test_a_server_without_our_plugin_is_refused_before_the_first_step(workplace: Workplace):
    launch = [word for word in preset("tiny-http")["rollout"]["launch"] if word not in ("--picks", "recorded")]
    ended = launched(workplace, "stock", launch)
    assert ended.code == 1 and not ended.records
    assert "zeros for a pooled indexer; the server has not loaded this package's plugin" in ended.error


def test_the_key_is_in_no_file_of_the_run_in_no_output_and_in_no_list_of_processes(watched: Watched):
    ended, key = watched.ended, watched.key.encode()
    assert len(key) > 30 and len(watched.commands) > 4
    assert not [command for command in watched.commands if watched.key in " ".join(command)]
    files = [path for path in ended.run_dir.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if key in path.read_bytes()]
    assert watched.key not in ended.output


def test_a_run_with_servers_that_share_the_trainers_devices(workplace: Workplace):
    """They sleep whenever the trainer computes, and every time they wake they are given the weights of that version."""
    changes = (*SETTINGS, "output.run_id=colocated", "rollout.placement=colocated", "train.steps=2")
    words = (word for setting in changes for word in ("--set", setting))
    with running(workplace.folder, "train", "--preset", "tiny-http", *words) as run:
        ended = end_of(run, workplace.run_dir("colocated"), SECONDS_TO_FINISH)
    assert ended.code == 0, ended.output
    assert [record["weights_version"] for record in ended.records] == [0, 1]
    assert ended.records[0]["start_mismatch_kl_mean"] <= 1e-8
    assert all(record["mismatch_kl_mean"] <= 1e-6 for record in ended.records)
    assert [(ended.run_dir / f"engine-{number}.log").read_text().count("listening") for number in (0, 1)] == [1, 1]


def test_servers_listen_on_the_loopback_interface_only(watched: Watched):
    assert watched.listening and set(watched.listening) == {"127.0.0.1"}
