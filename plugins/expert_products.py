"""Which of Transformer Engine's implementations multiplies the experts' matrices."""

import os

import torch

from glm5_next.plugins.megatron_config import TRANSFORMER_ENGINE, Glm5NextTransformerConfig

SWITCH = "NVTE_USE_CUTLASS_GROUPED_GEMM"  # of Transformer Engine
FEW_ROWS = 512


def choose_expert_products(config: Glm5NextTransformerConfig, tokens: int) -> str:
    """The one for rows of `tokens` tokens on every rank, switched on for this process; its name.

    cuBLAS takes one launch for each expert, which the host cannot queue fast enough for many small products. One H200,
    bf16, forward and backward, time of cuBLAS over CUTLASS's (scripts/bench_experts.py): 288 experts with 227 rows each
    1.7, 144 with 455 rows 1.0, 36 with 1820 rows 0.94, 18 with 3640 rows 0.90. Only where every rank has all experts: on
    the way to CUTLASS, Transformer Engine 2.20 looks at the first product, also on a rank whose experts got no token and
    that has none. A value of NVTE_USE_CUTLASS_GROUPED_GEMM that the user has set stays.
    """
    if config.transformer_impl != TRANSFORMER_ENGINE:
        return "torch"
    sharing = config.expert_tensor_parallel_size or 1
    choices = tokens * sharing // config.tensor_model_parallel_size * config.moe_router_topk
    few = config.expert_model_parallel_size == 1 and choices / config.num_moe_experts < FEW_ROWS
    few = few and torch.cuda.get_device_capability() == (9, 0)
    return "CUTLASS" if os.environ.setdefault(SWITCH, str(int(few))) == "1" else "cuBLAS"
