"""Optimizer state in a form that does not know the layout it was saved from.

megatron-core 0.19.2 keeps one optimizer per kind of parameter (dense, experts) where experts have groups of their own,
and saves them as a list: a checkpoint of two cannot be loaded into one. Its tensors, however, are keyed by parameter,
whatever optimizer held them. So only those tensors and the step count are stored; parameter groups are what the current
settings say (the learning rate follows from the schedule's own state).
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from glm5_next.launchers.runtime.offload_state import start_offloaded_states

# Of the distributed optimizer's formats the one in the shapes of parameters; the others fix the data-parallel size.
METADATA = {"chained_optim_avoid_prefix": True, "distrib_optim_sharding_type": "fully_reshardable"}


def sharded_optimizer_state(optimizer: MegatronOptimizer, model_state: dict[str, Any], *, is_loading: bool) -> Any:
    """(what to save or load, the optimizers' own state dictionaries with everything else in them)."""
    _start_states(optimizer)
    skeletons = [
        part.sharded_state_dict(model_state, is_loading=is_loading, metadata=METADATA) for part in _parts(optimizer)
    ]
    leaves = [leaf for skeleton in skeletons for _, _, leaf in _sharded_leaves(skeleton)]
    return {"tensors": dict(enumerate(leaves)), "step": _step(skeletons)}, skeletons


def load_optimizer_state(optimizer: MegatronOptimizer, loaded: dict[str, Any], skeletons: list[Any]) -> None:
    """Puts loaded tensors back into the dictionaries that `sharded_optimizer_state` made, and those into place."""
    places = [place for skeleton in skeletons for place in _sharded_leaves(skeleton)]
    for number, (container, key, _) in enumerate(places):
        container[key] = loaded["tensors"][number]
    for part, skeleton in zip(_parts(optimizer), skeletons, strict=True):
        _unwrap_local_objects(skeleton)
        _set_step(skeleton, loaded["step"])
        with torch.no_grad():  # the distributed optimizer writes into views of parameters
            part.load_state_dict(skeleton)
        _own_steps(part)


def _own_steps(part: MegatronOptimizer) -> None:
    """megatron-core 0.19.2 hands one `step` tensor to all parameters of torch's Adam, which then adds to it for each."""
    for state in part.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def _start_states(optimizer: MegatronOptimizer) -> None:
    """Zeros where nothing was updated yet: before a load, or before a save of a run whose first groups were all dropped.
    Megatron asks torch's Adam for `step` before it has put one there."""
    for part in _parts(optimizer):
        if hasattr(part.optimizer, "sub_optimizers"):  # Megatron's offloading optimizer
            start_offloaded_states(part.optimizer)
            continue
        part.init_state_fn(part.optimizer, part.config)
        if isinstance(part.optimizer, torch.optim.Adam):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.zeros(()))


def _sharded_leaves(tree: Any) -> Iterator[tuple[Any, Any, ShardedBase]]:
    """(container, key, leaf) of every sharded leaf, in an order that depends on the structure only."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        if isinstance(value, ShardedBase):
            yield tree, key, value
        else:
            yield from _sharded_leaves(value)


def _unwrap_local_objects(tree: Any) -> None:
    """What `dist_checkpointing.load` does for values that a checkpoint leaves to the loading side."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if isinstance(value, LocalNonpersistentObject):
            tree[key] = value.unwrap()
        elif isinstance(value, dict | list):
            _unwrap_local_objects(value)


def _step_places(skeleton: dict[str, Any]) -> list[dict[str, Any]]:
    """The dictionaries whose `step` counts updates: the groups of the distributed optimizer and of fused Adam."""
    return [group for group in _torch_state(skeleton)["param_groups"] if "step" in group]


def _torch_state(skeleton: dict[str, Any]) -> dict[str, Any]:
    """The torch optimizer's state dictionary; the fp32 optimizer of Megatron adds nothing around it."""
    return skeleton.get("optimizer", skeleton)


def _step(skeletons: list[dict[str, Any]]) -> int:
    """Updates so far; all parameters share the number."""
    steps = {int(group["step"]) for skeleton in skeletons for group in _step_places(skeleton)}
    steps |= {int(state["common_step"]) for state in _states(skeletons) if "common_step" in state}
    assert len(steps) <= 1, f"parameters have been updated different numbers of times: {sorted(steps)}"
    return steps.pop() if steps else 0


def _states(skeletons: list[dict[str, Any]]) -> Iterator[dict[Any, Any]]:
    return (_torch_state(skeleton).get("state", {}) for skeleton in skeletons)


def _set_step(skeleton: dict[str, Any], step: int) -> None:
    for group in _step_places(skeleton):
        group["step"] = step
    if not _step_places(skeleton):
        _torch_state(skeleton)["state"]["common_step"] = torch.tensor(float(step))


def _accept_states_without_step() -> None:
    """megatron-core 0.19.2 fails to load this format with torch's Adam: it asks each parameter's state for a `step`,
    which it saves once for all. Its loop skips whatever is no tensor, so an absent key has to read as None."""
    original = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states(self: DistributedOptimizer, model_param: Any, tensors: dict[str, Any]) -> None:
        original(self, model_param, defaultdict(lambda: None, tensors))

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


_accept_states_without_step()
