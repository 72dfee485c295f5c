"""Servers get GPUs of their own, on one node each, or the run says how many are missing."""

import pytest

from glm5_next.launchers.runtime import placement


@pytest.mark.parametrize(("gpus", "options"), [(0, {}), (16, {"num_gpus": 4}), (20, {"num_gpus": 4})])
def test_a_server_has_its_gpus_beside_those_of_the_trainers(monkeypatch, gpus, options):
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": float(gpus)})
    assert placement.server_options(ranks=8, servers=2, tp=4) == options


def test_too_few_gpus_for_both_are_counted(monkeypatch):
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"GPU": 15.0})
    with pytest.raises(ValueError, match=r"8 trainer ranks and 2 servers of 4 GPUs .* need 16 GPUs, there are 15"):
        placement.server_options(ranks=8, servers=2, tp=4)


def test_a_run_is_local_unless_it_joins_a_ray(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert placement.is_local()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not placement.is_local()


@pytest.mark.parametrize(("places", "unused"), [([{}, {}], 1), ([{"num_gpus": 1}], 0)])
def test_gpus_that_stay_unused_are_counted(monkeypatch, places, unused):
    monkeypatch.setattr(placement.ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    assert placement.unused_gpus(places) == unused


SLOW = "The current node timed out during startup."


@pytest.mark.parametrize(
    ("failures", "text", "tries"), [(0, SLOW, 1), (2, SLOW, 3), (9, SLOW, 3), (9, "no such address", 1)]
)
def test_a_ray_that_is_slow_to_start_gets_another_try(monkeypatch, failures, text, tries):
    calls = []

    def init(**arguments):
        calls.append("init")
        if len(calls) - calls.count("shutdown") <= failures:
            raise Exception(text)  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(placement.ray, "init", init)
    monkeypatch.setattr(placement.ray, "shutdown", lambda: calls.append("shutdown"))
    if failures >= tries:
        with pytest.raises(Exception, match=text):
            placement.start_ray(1)
    else:
        placement.start_ray(1)
    assert calls.count("init") == tries and calls.count("shutdown") == min(failures, tries - 1)
