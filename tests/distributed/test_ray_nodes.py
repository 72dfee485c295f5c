"""A Ray with several nodes: a run joins it, ranks get their node and GPU, and nobody without the key gets in."""

import json
import os
import subprocess
import sys

import pytest

# Two nodes of two pretended GPUs each, as processes of this machine.
PROGRAM = """
import json, os, secrets, sys
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
import ray
from ray.cluster_utils import Cluster
from glm5_next.launchers.failures import WorkerFailed
from glm5_next.launchers.runtime.placement import check_cpus, guest_options, init_arguments, trainer_options

cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=80 * 2**20, include_dashboard=False)
os.environ["RAY_ADDRESS"] = cluster.address
ray.init(**init_arguments(1))

@ray.remote(num_cpus=1)
class Rank:
    def where(self):
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

def refusal(ranks, check=lambda ranks: trainer_options(ranks, deadline=1)):
    try:
        check(ranks)
    except (ValueError, WorkerFailed) as error:
        return type(error).__name__ + ": " + str(error)

result = {"refused": refusal(3), "cpus": [refusal(8, check_cpus), refusal(9, check_cpus)]}
places = trainer_options(4, guests=2)
ranks = [Rank.options(**place).remote() for place in places]
result["where"] = ray.get([rank.where.remote() for rank in ranks])
guests = [Rank.options(**guest_options(places[host])).remote() for host in (0, 3)]
result["guests"] = ray.get([guest.where.remote() for guest in guests])
result["taken"] = refusal(2)
result["no_gpus"] = trainer_options(5)
code = f"from ray._raylet import GcsClient; print(len(GcsClient(address='{cluster.address}').get_all_node_info(timeout=5)))"
import subprocess
def ask(key):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | key
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()
mode = {"RAY_AUTH_MODE": "token"}
result["answers"] = [
    ask({}), ask(mode | {"RAY_AUTH_TOKEN": "0" * 64}), ask(mode | {"RAY_AUTH_TOKEN": os.environ["RAY_AUTH_TOKEN"]})
]
session = ray._private.worker._global_node.get_session_dir_path()
key = os.environ["RAY_AUTH_TOKEN"]
words = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
logs = subprocess.run(["grep", "-rlE", key, session + "/logs"], capture_output=True, text=True).stdout
result["key_seen"] = [key in words, logs]
print("RESULT " + json.dumps(result))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def result() -> dict:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("RESULT "))


def test_consecutive_ranks_share_a_node_and_each_has_its_gpu(result):
    nodes = [node for node, _ in result["where"]]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {(node, *gpus) for node, gpus in result["where"]} == {(node, gpu) for node in nodes for gpu in (0, 1)}


def test_an_embedded_engine_is_on_the_node_of_its_rank_and_takes_no_gpu(result):
    assert result["guests"] == [[result["where"][0][0], []], [result["where"][3][0], []]]


def test_what_cannot_be_placed_is_refused_in_words(result):
    assert result["refused"] == "ValueError: parallel.ranks is 3, which does not fill nodes of 2 GPUs"
    assert result["taken"].startswith("WorkerFailed: no place for 2 trainer ranks on 1 node(s) with 2 GPUs")
    assert result["no_gpus"] == [{}] * 5
    assert result["cpus"][0] is None and "9 ranks and engines" in result["cpus"][1]


def test_only_who_has_the_key_is_answered(result):
    assert result["answers"] == ["", "", "2"]


def test_the_key_is_in_no_process_list_and_no_log(result):
    assert result["key_seen"] == [False, ""]


LOCAL = """
import os, sys, subprocess
from glm5_next.launchers.runtime.placement import init_arguments
import ray
ray.init(**init_arguments(1))
address = ray.get_runtime_context().gcs_address
code = f"from ray._raylet import GcsClient; print(len(GcsClient(address='{address}').get_all_node_info(timeout=5)))"
for kept in (False, True):
    environment = {name: value for name, value in os.environ.items() if kept or not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    print("ANSWER", done.stdout.strip() or "refused")
ray.shutdown()
"""


def test_a_run_on_one_machine_asks_for_a_key_too():
    """Ray's daemons listen on every interface, also on a laptop."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LOCAL], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert [line for line in done.stdout.splitlines() if line.startswith("ANSWER")] == ["ANSWER refused", "ANSWER 1"], (
        done.stdout + done.stderr
    )
