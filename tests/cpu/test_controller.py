"""The loop's rules: what is called when, and what is counted."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from glm5_next.launchers.config import load_run_config
from glm5_next.launchers.runtime.batch import Batch, StepReport
from glm5_next.launchers.runtime.checkpoint_folder import last_checkpoint
from glm5_next.launchers.runtime.engine import Lost
from tests.support.loop import HELDOUT, Loop, Recorder


def test_every_drawn_sample_is_trained_on_or_dropped(tmp_path):
    loop = Loop(tmp_path, "train.steps=6", "grpo.max_resample_rounds=1").go()
    state, generated = loop.state, [event for event in loop.cluster.events if event[0] == "generate"]
    assert state.samples_drawn == state.samples_trained + state.samples_dropped
    assert state.samples_trained == sum(len(batch.samples) for batch in loop.cluster.batches)
    assert state.samples_trained == sum(record["samples_trained"] for record in loop.records)
    # the first call is the comparison at the start, which is no step
    assert state.samples_drawn == sum(prompts * copies for _, prompts, copies in generated[1:])
    assert state.samples_dropped > 0 and state.prompt_cursor == state.samples_drawn / 2


def test_a_step_without_a_group_left_changes_nothing_but_the_cursor(tmp_path):
    loop = Loop(tmp_path, "train.steps=2", "grpo.max_resample_rounds=2", reward=lambda prompt, text: 1.0).go()
    assert "train" not in loop.cluster.names() and "publish" not in loop.cluster.names()
    assert loop.state.weights_version == 0 and loop.state.samples_trained == 0
    assert loop.state.prompt_cursor == 2 * 3 * 3
    for record in loop.records:
        assert record["loss"] is None and record["grad_norm"] is None and record["mismatch_kl_mean"] is None
        assert record["samples_trained"] == 0 and record["groups_dropped"] == 9 and record["reward_mean"] == 1.0


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_resampling_ends_at_its_cap(rounds, tmp_path):
    loop = Loop(tmp_path, "train.steps=1", f"grpo.max_resample_rounds={rounds}", reward=lambda prompt, text: 0.0).go()
    assert loop.cluster.names().count("generate") == 1 + 1 + rounds  # start, step, extra rounds
    assert loop.records[0]["resample_rounds"] == rounds


def test_nothing_is_sampled_between_an_update_and_its_publication(tmp_path):
    loop = Loop(tmp_path, "grpo.drop_zero_spread=false").go()
    step = ["generate", "train", "score", "publish", "engine score"]
    assert loop.cluster.names() == ["generate", "score", *4 * step, "save", "saved"]
    assert loop.cluster.versions == [1, 2, 3, 4]
    assert [record["weights_version"] for record in loop.records] == [0, 1, 2, 3]


def test_a_resumed_run_publishes_its_weights_before_it_samples(tmp_path):
    loop = Loop(tmp_path, next_step=2, weights_version=2, prompt_cursor=6).go()
    assert loop.cluster.names()[:2] == ["publish", "generate"]
    assert loop.cluster.versions[0] == 2
    assert [record["step"] for record in loop.records] == [2, 3]


def test_a_run_whose_steps_are_done_asks_the_ranks_for_nothing(tmp_path):
    assert Loop(tmp_path, next_step=4, weights_version=4).go().cluster.events == []


def test_the_same_state_draws_the_same_samples(tmp_path):
    whole = Loop(tmp_path / "whole").go()
    state = {"next_step": 2, "weights_version": 2, "prompt_cursor": cursor_after(whole, 2)}
    resumed = Loop(tmp_path / "part", **state).go()
    for name in ("step-000002.jsonl", "step-000003.jsonl"):
        assert (whole.folder / "rollouts" / name).read_text() == (resumed.folder / "rollouts" / name).read_text()


def cursor_after(loop: Loop, steps: int) -> int:
    return sum(record["groups_sampled"] for record in loop.records[:steps])


def test_an_engine_that_scores_probes_differently_after_an_update_stops_the_run(tmp_path):
    with pytest.raises(RuntimeError, match=r"engine 0 holds the new weights bit by bit but scores probes differently"):
        Loop(tmp_path, cluster=Recorder(offset_after_updates=0.01)).go()
    assert last_checkpoint(tmp_path) is None


def test_a_model_whose_log_probabilities_are_not_finite_is_not_blamed_on_the_engine(tmp_path):
    loop = Loop(tmp_path, "train.max_start_mismatch_kl=1e9")
    loop.cluster.publish = lambda version: setattr(loop.cluster, "trainer_offset", np.nan) or 0  # type: ignore
    with pytest.raises(RuntimeError, match=r"not finite after this update; optimizer.lr = 1e-06 is too large"):
        loop.go()


@pytest.mark.parametrize("heldout", [(), HELDOUT], ids=["training prompts", "held-out prompts"])
def test_an_engine_that_disagrees_at_the_start_stops_the_run_before_the_first_update(heldout, tmp_path):
    loop = Loop(tmp_path, cluster=Recorder(trainer_offset=0.5), heldout=heldout)
    with pytest.raises(
        RuntimeError, match=r"engine and trainer disagree before the first update: mean KL .* 12 tokens"
    ):
        # two held-out prompts and two samples of each, or as many training prompts
        loop.run = loop.controller.run = loop.run.model_copy(
            update={"rollout": loop.run.rollout.model_copy(update={"prompts_per_step": 2})}
        )
        loop.go()
    assert "train" not in loop.cluster.names()


def test_the_comparison_at_the_start_covers_every_sampled_token(tmp_path):
    record = Loop(tmp_path, "train.steps=1").go().records[0]
    assert record["start_mismatch_kl_mean"] == 0.0 and record["start_mismatch_tokens"] == 3 * 2 * 3


@pytest.mark.parametrize(("every", "expected"), [(0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_checkpoints_are_taken_at_their_steps_and_after_the_last(every, expected, tmp_path):
    assert Loop(tmp_path, "train.steps=5", f"train.checkpoint_every={every}").go().checkpoints == expected


def test_old_checkpoints_are_dropped(tmp_path):
    Loop(tmp_path, "train.checkpoint_every=1", "train.keep_checkpoints=2").go()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


@pytest.mark.parametrize("every", [0, 2], ids=["between checkpoints", "at a checkpoint"])
def test_a_stop_request_ends_the_loop_after_the_step_with_one_checkpoint(every, tmp_path):
    loop = Loop(tmp_path, f"train.checkpoint_every={every}")
    loop.stop_in_step = 1
    loop.go()
    assert loop.state.next_step == 2 and not loop.controller.done
    assert loop.checkpoints == [2]
    assert loop.shown == [0, 1] and not loop.stop.waits


def test_a_stop_request_is_not_kept_waiting_after_a_failure(tmp_path):
    loop = Loop(tmp_path, cluster=Recorder(offset_after_updates=1.0))
    with pytest.raises(RuntimeError):
        loop.go()
    assert not loop.stop.waits


def test_mini_batches_share_a_steps_groups_and_never_split_one(tmp_path):
    loop = Loop(tmp_path, "train.steps=1", "rollout.prompts_per_step=5", "grpo.mini_batches=3").go()
    groups = [[sample.prompt_id for sample in batch.samples] for batch in loop.cluster.batches]
    assert len(groups) == 3 and all(ids.count(prompt) == 2 for ids in groups for prompt in ids)
    assert sum(len(ids) for ids in groups) == loop.records[0]["samples_trained"]
    assert loop.state.weights_version == 1


def test_mini_batches_get_the_log_probabilities_from_before_the_first_of_them(tmp_path):
    loop = Loop(tmp_path, "train.steps=1", "grpo.mini_batches=2", "grpo.kl_coef=0.1").go()
    for batch in loop.cluster.batches:
        for sample in batch.samples:
            assert batch.old_logprobs is not None and sample.sample_id in batch.old_logprobs
            assert batch.reference_logprobs is not None and sample.sample_id in batch.reference_logprobs
    assert ("score", ("reference", True)) in loop.cluster.events


def test_a_single_update_needs_no_extra_forward_pass(tmp_path):
    loop = Loop(tmp_path, "train.steps=1").go()
    assert loop.cluster.batches[0].old_logprobs is None and loop.cluster.batches[0].reference_logprobs is None
    assert loop.cluster.names().count("score") == 2  # at the start and of the probes


def test_advantages_are_those_of_each_sample_within_its_group(tmp_path):
    loop = Loop(tmp_path, "grpo.divide_by_std=true").go()
    for batch in loop.cluster.batches:
        for first, second in zip(batch.samples[::2], batch.samples[1::2], strict=True):
            better = first if first.reward > second.reward else second
            assert batch.advantages[better.sample_id] == 1.0
            assert batch.advantages[first.sample_id] == -batch.advantages[second.sample_id]


@pytest.mark.parametrize(("every", "expected"), [(0, [4]), (2, [1, 3, 4]), (3, [2, 4])])
def test_held_out_prompts_are_evaluated_at_their_steps_and_after_the_last(every, expected, tmp_path):
    loop = Loop(tmp_path, "train.steps=5", f"train.eval_every={every}", heldout=HELDOUT).go()
    assert [record["step"] for record in loop.records if "heldout_reward" in record] == expected
    assert "heldout_reward_start" in loop.records[0]
    evaluations = [event for event in loop.cluster.events if event == ("generate", len(HELDOUT), 1)]
    assert len(evaluations) == len(expected)


def test_an_export_replaces_an_earlier_one_and_what_a_killed_one_left(tmp_path):
    loop = Loop(tmp_path).go()
    for leftover in ("export", ".export.new", ".export.1234.partial"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "old").touch()
    loop.controller.export(tmp_path / "export")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["by"]
    assert not list(tmp_path.glob(".export*"))


class Slow(Recorder):
    """Sampling takes a while; an update of the engines while it lasts would change weights under samples."""

    sampling = False
    overlapped = 0

    def generate(self, prompts: Sequence[np.ndarray], copies: int, *, max_new_tokens: int, seed: int):
        self.sampling = True
        time.sleep(0.02)
        answer = super().generate(prompts, copies, max_new_tokens=max_new_tokens, seed=seed)
        self.sampling = False
        return answer

    def publish(self, version: int) -> int:
        assert not self.sampling, "weights change under samples that are on their way"
        return super().publish(version)

    def _train(self, batch: Batch) -> list[StepReport]:
        self.overlapped += self.sampling
        time.sleep(0.01)
        return super()._train(batch)


@pytest.mark.parametrize("ahead", [False, True], ids=["in turn", "one step off"])
def test_one_step_off_samples_the_next_step_from_the_weights_before_this_ones_update(ahead, tmp_path):
    settings = ["train.steps=5", "grpo.drop_zero_spread=false", f"rollout.one_step_off={str(ahead).lower()}"]
    loop = Loop(tmp_path, *settings, cluster=Slow()).go()
    sampled_by = [{sample.weights_version for sample in batch.samples} for batch in loop.cluster.batches]
    assert sampled_by == [{max(0, step - ahead)} for step in range(5)]
    assert [record["weights_version"] for record in loop.records] == [max(0, step - ahead) for step in range(5)]
    assert bool(loop.cluster.overlapped) is ahead
    assert loop.cluster.versions == [1, 2, 3, 4, 5]
    state = loop.state
    assert state.samples_drawn == state.samples_trained == 5 * 3 * 2 and state.prompt_cursor == 15


def test_samples_that_were_on_their_way_at_a_stop_are_drawn_again(tmp_path):
    settings = ["train.steps=5", "grpo.drop_zero_spread=false", "rollout.one_step_off=true"]
    loop = Loop(tmp_path / "a", *settings, cluster=Slow())
    loop.stop_in_step = 1
    state = loop.go().state
    assert state.prompt_cursor == 6 and state.samples_drawn == state.samples_trained == 12
    rest = Loop(tmp_path / "b", *settings, next_step=2, weights_version=2, prompt_cursor=6).go()
    assert rest.state.prompt_cursor == 15


def test_one_step_off_needs_importance_weights():
    changes = ["rollout.one_step_off=true", "grpo.importance_sampling=off"]
    with pytest.raises(ValueError, match="as if they were of the current ones"):
        load_run_config(None, {"model": {"checkpoint": "/none"}, "data": {"prompts": "tiny"}}, changes)


class Losing(Recorder):
    """The second sample of every group is lost, and the whole of the first group of every round."""

    def generate(self, prompts: Sequence[np.ndarray], copies: int, *, max_new_tokens: int, seed: int):
        groups: list[Any] = super().generate(prompts, copies, max_new_tokens=max_new_tokens, seed=seed)
        for number, group in enumerate(groups if copies > 1 else []):
            group[1] = Lost("request deadline")
            if number == 0:
                group[:] = [Lost("engine died")] * copies
        return groups


def test_what_engines_lose_is_counted_and_enough_of_a_group_is_trained_on(tmp_path):
    settings = ["rollout.samples_per_prompt=3", "grpo.drop_zero_spread=false", "grpo.max_resample_rounds=1"]
    enough = Loop(tmp_path / "enough", *settings, "rollout.min_samples=2", cluster=Losing()).go()
    short = Loop(tmp_path / "short", *settings, cluster=Losing()).go()
    for loop in (enough, short):
        state = loop.state
        generated = [event for event in loop.cluster.events if event[0] == "generate"][1:]
        assert state.samples_drawn == sum(prompts * copies for _, prompts, copies in generated)
        assert state.samples_drawn == state.samples_trained + sum(state.dropped_by_reason.values())
        assert state.dropped_by_reason["engine died"] > 0 and state.dropped_by_reason["request deadline"] > 0
        for record in loop.records:
            assert record["samples_lost"] <= record["samples_dropped"]
        lines = [json.loads(line) for line in (loop.folder / "rollouts/step-000000.jsonl").read_text().splitlines()]
        assert {line.get("reason") for line in lines} == {None, "engine died", "request deadline"}
    assert enough.state.samples_trained > 0 and "short group" not in enough.state.dropped_by_reason
    assert short.state.samples_trained == 0 and short.state.dropped_by_reason["short group"] > 0


@pytest.mark.parametrize("mini_batches", [1, 3])
def test_a_run_that_replays_its_own_choices_records_every_update_before_the_first(tmp_path, mini_batches):
    settings = ("train.steps=1", "grpo.drop_zero_spread=false", f"grpo.mini_batches={mini_batches}")
    loop = Loop(tmp_path, "replay.routing=record", *settings).go()
    events = [event for event in loop.cluster.events if event[0] in ("score", "train")]
    recording = [("score", ("record", True))] * mini_batches
    assert events[1 : 1 + 2 * mini_batches] == recording + [("train",)] * mini_batches
    assert all(batch.old_logprobs is not None for batch in loop.cluster.batches)
    without = Loop(tmp_path / "off", *settings).go()
    assert ("score", ("record", True)) not in without.cluster.events
