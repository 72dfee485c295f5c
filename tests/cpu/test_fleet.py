"""Who gets which request, what is given up when, and which engine is out: with engines that are a few lines each."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from glm5_next.launchers.config_rollout import RolloutSection
from glm5_next.launchers.engines.client import Request
from glm5_next.launchers.engines.fleet import Fleet
from glm5_next.launchers.engines.wire import EngineError, Malformed, Refused, Unreachable
from glm5_next.launchers.engines.wire import Late as LateError
from glm5_next.launchers.runtime.engine import Completion, Lost

PROMPTS = [np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32)]
Behaviour = Callable[[Request, float], Awaitable[Completion]]


def completion(version: int | None = 0) -> Completion:
    return Completion(
        tokens=np.array([7], dtype=np.int32),
        logprobs=np.array([-1.0], dtype=np.float32),
        routes=None,
        finish_reason="stop",
        weights_version=version,
    )


class StubEngine:
    """Answers at once, unless `behave` says otherwise. `alive` is what its health check says."""

    def __init__(self, name: str, behave: Behaviour | None = None):
        self.name, self.behave, self.alive, self.cached = name, behave, True, 0
        self.asked: list[str] = []
        self.aborted: list[str] = []
        self.most_at_once = self._at_once = 0

    async def healthy(self) -> bool:
        return self.alive

    async def generate(self, request: Request, deadline: float) -> Completion:
        self.asked.append(request.id)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            async with asyncio.timeout(deadline):
                await asyncio.sleep(0.001)
                return await self.behave(request, deadline) if self.behave else completion()
        except TimeoutError:
            raise LateError(f"{self.name}: late") from None
        finally:
            self._at_once -= 1

    async def score(self, tokens: list[int], deadline: float) -> np.ndarray:
        return np.zeros(len(tokens) - 1, dtype=np.float32)

    async def cached_tokens(self, tokens: list[int], deadline: float) -> int:
        return self.cached

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def settings(**changes) -> RolloutSection:
    deadlines = {"request_deadline": 0.3, "sample_deadline": 0.5, "step_deadline": 2.0}
    return RolloutSection(**({"engine": "sglang", "batch_size": 4} | deadlines | changes))


def fleet_of(*engines: StubEngine, **changes) -> Fleet:
    fleet = Fleet(engines, settings(**changes))  # type: ignore[arg-type]
    fleet.updated(0, {}, list(fleet.members))
    return fleet


def sample(fleet: Fleet, copies: int = 4) -> list[list[Completion | Lost]]:
    """A round; fails if it leaves a task behind."""

    async def run() -> list[list[Completion | Lost]]:
        answers = await fleet.generate(PROMPTS, copies, max_new_tokens=4, seed=1)
        assert len(asyncio.all_tasks()) == 1, "a task is left behind"
        return answers

    return asyncio.run(run())


def reasons(groups: list[list[Completion | Lost]]) -> Counter[str]:
    return Counter(answer.reason if isinstance(answer, Lost) else "came" for group in groups for answer in group)


async def for_ever(request: Request, deadline: float) -> Completion:
    await asyncio.sleep(100)
    raise AssertionError


def raises(error: EngineError) -> Behaviour:
    async def behave(request: Request, deadline: float) -> Completion:
        raise error

    return behave


def test_all_samples_come_in_the_order_of_the_prompts_and_the_work_is_shared():
    one, other = StubEngine("one"), StubEngine("other")
    groups = sample(fleet_of(one, other))
    assert [len(group) for group in groups] == [4, 4] and reasons(groups) == {"came": 8}
    assert len(one.asked) == len(other.asked) == 4
    assert len({*one.asked, *other.asked}) == 8, "every request has an id of its own"


def test_an_engine_gets_no_more_than_it_may_have_at_once():
    one = StubEngine("one")
    assert reasons(sample(fleet_of(one, batch_size=3), copies=10)) == {"came": 20}
    assert one.most_at_once == 3


def test_a_request_that_never_returns_is_aborted_at_its_deadline_and_asked_of_another_engine():
    stuck, good = StubEngine("stuck", for_ever), StubEngine("good")
    groups = sample(fleet_of(stuck, good, sample_deadline=2.0))
    assert reasons(groups) == {"came": 8}
    assert stuck.asked and sorted(stuck.aborted) == sorted(stuck.asked)


def test_a_sample_that_never_comes_is_lost_at_its_deadline_and_the_others_are_kept():
    async def behave(request: Request, deadline: float) -> Completion:
        return await for_ever(request, deadline) if request.id.endswith("0.2") else completion()

    groups = sample(fleet_of(StubEngine("one", behave), StubEngine("other", behave)))
    assert reasons(groups)["came"] == 7
    assert groups[0][2] in (Lost("request deadline"), Lost("sample deadline"))


def test_a_round_ends_at_its_deadline_and_aborts_what_is_left():
    stuck = StubEngine("stuck", for_ever)
    long = {"request_deadline": 0.4, "sample_deadline": 0.4, "step_deadline": 0.4}
    fleet = fleet_of(stuck, batch_size=2, **long)
    groups = sample(fleet)
    assert set(reasons(groups)) <= {"step deadline", "sample deadline", "request deadline"}
    assert sorted(stuck.aborted) == sorted(stuck.asked)
    assert all(member.in_flight == 0 for member in fleet.members.values())


def test_an_engine_that_dies_in_the_middle_of_a_group_loses_nothing_while_another_lives():
    async def dies(request: Request, deadline: float) -> Completion:
        if len(dying.asked) > 2:
            dying.alive = False
            raise Unreachable("dying: ConnectError")
        return completion()

    dying, good = StubEngine("dying", dies), StubEngine("good")
    fleet = fleet_of(dying, good)
    assert reasons(sample(fleet)) == {"came": 8}
    assert fleet.members["dying"].state == "gone" and [member.client.name for member in fleet.ready] == ["good"]


def test_a_broken_connection_does_not_put_an_engine_out_that_still_answers():
    async def once(request: Request, deadline: float) -> Completion:
        if len(one.asked) == 1:
            raise Unreachable("one: ReadError")
        return completion()

    one = StubEngine("one", once)
    fleet = fleet_of(one)
    assert reasons(sample(fleet)) == {"came": 8} and fleet.members["one"].state == "ready"


def test_with_no_engine_left_the_finished_samples_are_kept():
    async def dies(request: Request, deadline: float) -> Completion:
        if len(only.asked) > 3:
            only.alive = False
            raise Unreachable("only: ConnectError")
        return completion()

    only = StubEngine("only", dies)
    counts = reasons(sample(fleet_of(only, batch_size=1)))
    assert counts["came"] == 3 and counts["engine died"] + counts["no engine"] == 5


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused("502", 502), "refused or aborted"),
        (Refused("400", 400), "refused or aborted"),
        (Malformed("no"), "bad answer"),
    ],
)
def test_an_answer_that_is_none_is_asked_for_elsewhere_and_counted_if_it_never_comes(error, reason):
    bad, good = StubEngine("bad", raises(error)), StubEngine("good")
    assert reasons(sample(fleet_of(bad, good))) == {"came": 8}
    assert reasons(sample(fleet_of(StubEngine("bad", raises(error))))) == {reason: 8}


def test_an_answer_of_other_weights_is_not_taken():
    async def old(request: Request, deadline: float) -> Completion:
        return completion(version=3)

    fleet = fleet_of(StubEngine("old", old))
    assert reasons(sample(fleet)) == {"bad answer": 8}
    fleet.updated(3, {}, ["old"])
    assert reasons(sample(fleet)) == {"came": 8}


def test_an_engine_whose_update_failed_gets_nothing_until_a_whole_update_has_succeeded():
    one, other = StubEngine("one"), StubEngine("other")
    fleet = fleet_of(one, other)
    fleet.updated(1, {"one": "one: bucket 3: status 400"}, ["one", "other"])
    other.behave = one.behave = lambda request, deadline: _answer(1)
    assert reasons(sample(fleet)) == {"came": 8} and not one.asked
    assert fleet.members["one"].why == "one: bucket 3: status 400"
    fleet.updated(1, {}, ["one", "other"])
    assert reasons(sample(fleet)) == {"came": 8} and one.asked


async def _answer(version: int) -> Completion:
    return completion(version)


def test_an_engine_that_still_has_a_cache_after_an_update_is_put_out():
    stale, good = StubEngine("stale"), StubEngine("good")
    stale.cached = 2
    fleet = fleet_of(stale, good)
    assert len(asyncio.run(fleet.score(PROMPTS))) == 1
    assert fleet.members["stale"].state == "quarantined" and "older weights" in fleet.members["stale"].why
    good.cached = 2  # of its own answers, after the first look
    assert len(asyncio.run(fleet.score(PROMPTS))) == 1 and fleet.members["good"].state == "ready"


def test_a_server_that_was_started_again_has_to_be_updated_first():
    fleet = fleet_of(StubEngine("one"))
    fleet.replace(StubEngine("one"))  # type: ignore[arg-type]
    assert not fleet.ready and reasons(sample(fleet)) == {"no engine": 8}
