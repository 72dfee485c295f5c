"""The written-down layout of distributed checkpoints is the one that Megatron makes of the model."""

from dataclasses import replace

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories

from glm5_next.bridge import dist_names
from glm5_next.bridge.dist_names import COMMON_STATE, extra_state, regions
from glm5_next.bridge.name_map import model_tensors
from glm5_next.bridge.tiny_config import TinyModel, composite_config
from glm5_next.launchers.runtime.optimizer_state import METADATA
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.megatron_config import megatron_config
from glm5_next.plugins.spec import build_gpt_model
from glm5_next.plugins.topology import Topology
from tests.support.tiny import start_single_process

# 8 layers: KDA and DSA, dense and MoE, in all four combinations.
CONFIG = Glm5NextConfig.from_hf(composite_config(TinyModel(layers=8, dense_layers=4, experts=3, vision=False)))


def of_megatron(dtype: torch.dtype, *, mtp: bool = False) -> tuple[set, set]:
    """Tensors and objects that `sharded_state_dict` names, on the meta device."""
    start_single_process()
    built = {"mtp_num_layers": CONFIG.num_mtp_layers if mtp else None, "perform_initialization": False, "bf16": False}
    config = megatron_config(CONFIG, Topology(), dtype=dtype, on_cpu=True, **built)
    with torch.device("meta"):
        state = build_gpt_model(config).sharded_state_dict(metadata=METADATA)
    apply_factories(state)
    values = [value for value in nested_values(state) if not isinstance(value, dict)]
    tensors = {
        (v.key, tuple(v.global_offset), (1,) * v.prepend_axis_num + tuple(v.data.shape), tuple(v.global_shape), v.dtype)
        for v in values
        if isinstance(v, ShardedTensor)
    }
    return tensors, {value.unique_key for value in values if isinstance(value, ShardedObject)}


def of_the_table(dtype: torch.dtype, *, mtp: bool) -> tuple[set, set]:
    tensors, objects = set(), set()
    for entry in model_tensors(CONFIG, mtp=mtp):
        held = torch.float32 if entry.row.fp32_in_model else dtype
        tensors |= {(r.key, r.offset, r.shape, r.whole, held) for r in regions(entry, CONFIG)}
        objects |= {state for state in [extra_state(entry, CONFIG)] if state}
    return tensors, objects


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tensor_has_the_key_place_shape_and_dtype_that_megatron_gives_it(dtype, mtp):
    found, expected = of_the_table(dtype, mtp=mtp), of_megatron(dtype, mtp=mtp)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == theirs, (sorted(ours - theirs)[:3], sorted(theirs - ours)[:3])


def test_a_wrong_rule_would_show(monkeypatch):
    monkeypatch.setattr(dist_names, "SEPARATE_PARTS", {})
    tensors, _ = of_the_table(torch.bfloat16, mtp=False)
    assert tensors != of_megatron(torch.bfloat16)[0]


def test_what_is_no_tensor_is_saved_under_one_key():
    assert ShardedObject("common_state", None, (1,), (0,)).unique_key == COMMON_STATE


def test_regions_hold_every_row_of_every_hf_tensor_once():
    for entry in model_tensors(CONFIG, mtp=True):
        rows = {name: [] for name in entry.hf}
        for region in regions(entry, CONFIG):
            assert region.shape[region.row_dim] == region.num_rows
            rows[region.hf] += range(region.row, region.row + region.num_rows)
        assert all(found == list(range(len(found))) and found for found in rows.values()), entry


def test_rows_of_a_region_lie_where_the_region_does():
    for entry in model_tensors(replace(CONFIG, num_mtp_layers=0), mtp=False):
        for region in regions(entry, CONFIG):
            part = region.rows(0, 1)
            assert part.offset == region.offset and part.whole == region.whole and part.row == region.row
            last = region.rows(region.num_rows - 1, region.num_rows)
            moved = [b - a for a, b in zip(region.offset, last.offset)]
            assert sum(moved) == moved[region.row_dim] == region.num_rows - 1
