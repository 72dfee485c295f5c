"""How a model is spread over ranks. Needs neither torch nor Megatron."""

from dataclasses import dataclass
from itertools import pairwise

from glm5_next.plugins.config import Glm5NextConfig


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Parallel sizes. The data-parallel size is whatever is left: world_size / (tp * pp).

    `vpp` is the number of model chunks per pipeline rank (virtual stages); None means one chunk.
    """

    world_size: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "ep", "etp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.world_size % (self.tp * self.pp):
            raise ValueError(
                f"{self.world_size} ranks cannot hold tp {self.tp} x pp {self.pp}: "
                f"the number of ranks must be a multiple of {self.tp * self.pp}"
            )
        if self.world_size % (self.etp * self.ep * self.pp):
            raise ValueError(
                f"{self.world_size} ranks cannot hold etp {self.etp} x ep {self.ep} x pp {self.pp}: "
                f"the number of ranks must be a multiple of {self.etp * self.ep * self.pp}"
            )
        if self.vpp is not None and (self.vpp < 2 or self.pp < 2):
            raise ValueError(f"vpp {self.vpp} needs vpp >= 2 and pp >= 2 (pp is {self.pp}); leave vpp out otherwise")

    @property
    def dp(self) -> int:
        """Data-parallel replicas of the dense part."""
        return self.world_size // (self.tp * self.pp)

    @property
    def num_stages(self) -> int:
        """Pipeline stages, virtual ones included."""
        return self.pp * (self.vpp or 1)

    def check_model(self, model: Glm5NextConfig) -> None:
        """Raises ValueError where the model's sizes do not divide."""
        divisors = {
            "num_attention_heads": (model.num_attention_heads, "tp", self.tp),
            "linear_attn_config.num_heads": (model.kda_num_heads, "tp", self.tp),
            "intermediate_size": (model.ffn_hidden_size, "tp", self.tp),
            "n_routed_experts": (model.num_experts, "ep", self.ep),
            "moe_intermediate_size": (model.moe_ffn_hidden_size, "etp", self.etp),
        }
        for key, (value, name, size) in divisors.items():
            if value % size:
                raise ValueError(f"{key} ({value}) is not a multiple of {name} ({size})")
        if model.moe_ffn_hidden_size * model.num_shared_experts % self.tp:
            raise ValueError(
                f"the shared experts' width ({model.moe_ffn_hidden_size * model.num_shared_experts}) "
                f"is not a multiple of tp ({self.tp})"
            )
        if model.num_layers < self.num_stages:
            raise ValueError(f"{model.num_layers} layers cannot fill {self.num_stages} pipeline stages")

    def layers_per_stage(self, num_layers: int) -> list[list[int]]:
        """Layer indices of every (virtual) stage in model order; stages differ by at most one layer.

        Earlier stages get the extra layers, except the last real ones: the head already costs the last stage more.
        """
        base, extra = divmod(num_layers, self.num_stages)
        bounds = [0]
        for stage in range(self.num_stages):
            bounds.append(bounds[-1] + base + (stage < extra))
        return [list(range(start, end)) for start, end in pairwise(bounds)]
