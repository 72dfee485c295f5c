"""Memory of one training rank, estimated from sizes alone. Needs no torch.

Weights, gradients and optimizer state follow from the parameter counts and are exact up to padding. Activations count
what the modules keep for the backward pass when every operator is one kernel that keeps its inputs; tests compare them
with what a tiny model keeps. Not counted: fragmentation, and communication buffers beyond a fixed allowance.
"""

from dataclasses import dataclass
from typing import Literal

from glm5_next.bridge.name_map import sizes
from glm5_next.bridge.stage_sizes import StageSize, stage_sizes
from glm5_next.plugins.config import AttentionKind, Glm5NextConfig, MlpKind
from glm5_next.plugins.topology import Topology

GIB = 2**30
ALLOWANCE = 4 * GIB  # CUDA context, NCCL buffers, workspaces
FP32, INT32 = 4, 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a rank is asked to do with the model. `tokens` is the length of a micro-batch row before TP splits it."""

    tokens: int
    precision: Literal["bf16", "fp32"] = "bf16"
    recompute: Literal["none", "full"] = "full"
    distributed_optimizer: bool = True
    offload: bool = False  # optimizer state in host memory
    guest: float = 0.0  # bytes that an embedded engine keeps on the card of a rank
    awake: float = 0.0  # bytes that a colocated server takes while it samples, when nothing is trained

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return {"bf16": 2, "fp32": 4}[self.precision]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank at the peak of a step. `transient` is what lives for a moment beside the activations: the logits
    with their gradient, or later the weight gradients of one module before they are added to `gradients`, whichever is
    more. `host` is what offloading moves to the host. `guest` and `awake` are the workload's."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    allowance: float = ALLOWANCE
    host: float = 0.0
    guest: float = 0.0
    awake: float = 0.0

    @property
    def engine(self) -> float:
        return max(self.guest, self.awake)

    @property
    def total(self) -> float:
        kept = self.weights + self.gradients + self.optimizer + self.guest + self.allowance
        return kept + max(self.activations + self.transient, self.awake)


def rank_memories(config: Glm5NextConfig, topology: Topology, workload: Workload) -> list[RankMemory]:
    """One entry per pipeline rank; ranks that share a pipeline position are alike."""
    return [
        _rank_memory(config, topology, workload, position, stage)
        for position, stage in enumerate(stage_sizes(config, topology))
    ]


def _rank_memory(
    config: Glm5NextConfig, topology: Topology, workload: Workload, position: int, stage: StageSize
) -> RankMemory:
    optimizer = _optimizer_bytes(topology, workload, stage)
    return RankMemory(
        weights=workload.width * stage.parameters + (FP32 - workload.width) * stage.fp32,
        gradients=FP32 * (stage.parameters - stage.frozen),
        optimizer=0.0 if workload.offload else optimizer,
        activations=_activation_bytes(config, topology, workload, position, stage),
        transient=max(
            _weight_gradient_bytes(config, topology, workload, stage),
            _logit_bytes(config, topology, workload) if position == topology.pp - 1 else 0.0,
        ),
        host=optimizer if workload.offload else 0.0,
        guest=workload.guest,
        awake=workload.awake,
    )


def _optimizer_bytes(topology: Topology, workload: Workload, stage: StageSize) -> float:
    """Both Adam moments, and in a bf16 run the fp32 copy of every weight that is not fp32 already."""
    per_parameter = 2 * FP32 + (FP32 if workload.precision == "bf16" else 0)
    trained_fp32 = stage.fp32  # the selection biases among them are too few to matter
    dense = per_parameter * (stage.dense - stage.frozen) - (per_parameter - 2 * FP32) * trained_fp32
    expert = per_parameter * stage.expert
    if not workload.distributed_optimizer:
        return dense + expert
    expert_replicas = topology.world_size // (topology.etp * topology.ep * topology.pp)
    return dense / topology.dp + expert / expert_replicas


def _activation_bytes(
    config: Glm5NextConfig, topology: Topology, workload: Workload, position: int, stage: StageSize
) -> float:
    """Micro-batches in flight keep their activations; with full recomputation only every layer's input, plus one layer's
    activations and as much again for their gradients while that layer is computed backwards."""
    in_flight = chunks_in_flight(topology, position) / (topology.vpp or 1)
    layers = [
        layer_bytes(config, topology, workload, config.attention_kinds[layer], config.mlp_kinds[layer])
        for layer in stage.layers
    ]
    if workload.recompute == "none":
        return in_flight * sum(layers) + max(layers)
    kept = in_flight * len(stage.layers) * streams_bytes(config, topology, workload)
    return kept + 2 * max(layers)


def chunks_in_flight(topology: Topology, position: int) -> int:
    """Model chunks whose forward ran and whose backward did not, at most: 1F1B, or interleaved with virtual stages."""
    remaining = topology.pp - position
    if topology.vpp is None:
        return remaining
    return (topology.vpp - 1) * topology.pp + 2 * (remaining - 1) + 1


def streams_bytes(config: Glm5NextConfig, topology: Topology, workload: Workload) -> float:
    """The residual streams of one row between two layers: hc_mult times as wide as the hidden size."""
    return workload.tokens / topology.tp * config.num_streams * config.hidden_size * workload.width


def layer_bytes(
    config: Glm5NextConfig, topology: Topology, workload: Workload, attention: AttentionKind, mlp: MlpKind
) -> float:
    """What one layer keeps for its backward pass, its input among it."""
    attention_elements = _kda_elements(config) if attention == "kda" else _dsa_elements(config)
    mlp_elements = _dense_elements(config) if mlp == "dense" else _moe_elements(config)
    per_token = 2 * _site_elements(config) + attention_elements + mlp_elements
    kept = workload.tokens / topology.tp * per_token * workload.width
    kept += 2 * workload.tokens / topology.tp * _site_fp32_elements(config) * FP32
    if attention == "dsa":  # every TP rank holds the latents and the selected indices of all tokens
        indices = config.index_topk + config.index_kpool - 1
        kept += workload.tokens * (config.kv_lora_rank * workload.width + indices * INT32)
    if mlp == "moe":
        kept += workload.tokens / topology.tp * 2 * config.num_experts * FP32
    return kept


def _site_elements(config: Glm5NextConfig) -> int:
    """A hyper-connection and its norm: streams in; collapsed, normed, and the block's output."""
    return (config.num_streams + 3) * config.hidden_size


def _site_fp32_elements(config: Glm5NextConfig) -> int:
    return config.num_streams * (config.num_streams + 2)


def _kda_elements(config: Glm5NextConfig) -> int:
    """q, k, v before and after the convolution, decay and gate with their low-rank inputs, beta, output twice."""
    return 10 * config.kda_width + 2 * config.kda_head_dim + config.kda_num_heads


def _dsa_elements(config: Glm5NextConfig) -> int:
    """Both latents before and the query's after its norm, q, absorbed q, latent outputs, value outputs."""
    per_head = config.qk_head_dim + 2 * config.kv_lora_rank + config.v_head_dim
    return 2 * config.q_lora_rank + config.kv_lora_rank + config.num_attention_heads * per_head


def _dense_elements(config: Glm5NextConfig) -> int:
    return 3 * config.ffn_hidden_size


def _moe_elements(config: Glm5NextConfig) -> int:
    """Routed tokens with their gate, up and activated product; the same for the shared expert; evenly balanced."""
    routed = config.num_experts_per_token * (config.hidden_size + 3 * config.moe_ffn_hidden_size)
    return routed + 3 * sizes(config)["sM"]


def _weight_gradient_bytes(config: Glm5NextConfig, topology: Topology, workload: Workload, stage: StageSize) -> float:
    """Of the largest module of a stage. Grouped experts return the gradients of all their weights at once."""
    elements = 0.0
    for layer in stage.layers:
        if config.mlp_kinds[layer] == "dense":
            elements = max(elements, 2 * config.hidden_size * config.ffn_hidden_size / topology.tp)
        else:
            one = 2 * config.hidden_size * config.moe_ffn_hidden_size / topology.etp
            elements = max(elements, -(-config.num_experts // topology.ep) * one)
    return elements * workload.width


def _logit_bytes(config: Glm5NextConfig, topology: Topology, workload: Workload) -> float:
    """Logits and their gradient; the kernel of the log-probabilities makes no copy of them in fp32."""
    columns = -(-config.vocab_size // topology.tp)
    return 2 * workload.tokens * columns * workload.width
