"""megatron-core 0.19.2's offloading optimizer, as far as saving and loading it needs help."""

from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def start_offloaded_states(optimizer: HybridDeviceOptimizer) -> None:
    """Zeros where nothing was updated yet. Megatron's own way is a step with random gradients, which moves the weights."""
    for part in optimizer.sub_optimizers:
        for group in part.param_groups:
            for parameter in group["params"]:
                if not part.state[parameter]:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    part.state[parameter] = {"step": torch.zeros(()), **zeros}
    optimizer._sync_sub_optimizers_state_to_hdo()


def load_masters_of_every_dtype(kind: type[HybridDeviceOptimizer]) -> None:
    """After a load, Megatron copies the stored fp32 values into its fp32 copies, and knows none for a parameter that is
    fp32 itself: a KeyError for every model that keeps some in fp32. What it updates in the host's memory is known for all."""

    def update(self: Any) -> None:
        for parameter, state in self.state.items():
            self.param_to_inner_param[parameter].data.copy_(state["master_param"])

    kind._update_fp32_params_by_new_state = update


load_masters_of_every_dtype(HybridDeviceOptimizer)
