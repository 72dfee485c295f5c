"""What replay asks of engine, transport and trainer: every flag that must agree comes from here. Needs no torch."""

from dataclasses import dataclass

from glm5_next.launchers.config_sections import ReplaySection
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.pick_coding import most_bytes


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What an engine hands over with every completion: experts, their combine weights, the indexer's picks."""

    routes: bool = False
    route_weights: bool = False
    picks: bool = False

    @classmethod
    def of(cls, settings: ReplaySection) -> "Recording":
        routes = settings.routing == "engine"
        return cls(
            routes=routes,
            route_weights=routes and settings.routing_weights == "engine",
            picks=settings.indexer == "engine",
        )


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """The streams of a run and their shapes, from its settings and its model.

    moe_layers, dsa_layers: global 0-based numbers of the layers that route, and that select pools.
    """

    settings: ReplaySection
    moe_layers: tuple[int, ...]
    num_experts: int
    experts_per_token: int
    dsa_layers: tuple[int, ...]
    num_selected: int
    kpool: int

    @classmethod
    def of(cls, settings: ReplaySection, model: Glm5NextConfig) -> "ReplayPlan":
        return cls(
            settings=settings,
            moe_layers=tuple(i for i, kind in enumerate(model.mlp_kinds) if kind == "moe"),
            num_experts=model.num_experts,
            experts_per_token=model.num_experts_per_token,
            dsa_layers=tuple(i for i, kind in enumerate(model.attention_kinds) if kind == "dsa"),
            num_selected=model.num_pools_selected,
            kpool=model.index_kpool,
        )

    @property
    def recording(self) -> Recording:
        """What the engine has to record."""
        return Recording.of(self.settings)

    @property
    def from_engine(self) -> bool:
        """A sample without a usable record cannot be trained on."""
        return self.recording != Recording()

    @property
    def from_trainer(self) -> bool:
        """A forward pass before the update makes a record."""
        return "record" in (self.settings.routing, self.settings.indexer)

    @property
    def routes_shape(self) -> tuple[int, int]:
        """MoE layers and experts per token."""
        return len(self.moe_layers), self.experts_per_token

    def bytes_of_sample(self, num_tokens: int) -> dict[str, float]:
        """Largest payload of a sample of that many tokens, by stream."""
        recording, slots = self.recording, num_tokens * len(self.moe_layers) * self.experts_per_token
        return {
            "routes": 2.0 * slots * recording.routes,
            "route weights": 4.0 * slots * recording.route_weights,
            "picks": recording.picks * most_bytes(num_tokens, len(self.dsa_layers), self.num_selected, self.kpool),
        }

    def cost(self, num_tokens: int, num_samples: int) -> str:
        """One line for a run to print before it starts, for samples of at most `num_tokens` tokens."""
        streams = {name: size for name, size in self.bytes_of_sample(num_tokens).items() if size}
        if not streams:
            return "replay payload: none, the engine records nothing"
        total = sum(streams.values())
        shares = ", ".join(f"{name} {size / num_tokens:,.0f}" for name, size in streams.items())
        return (
            f"replay payload: at most {total / num_tokens:,.0f} bytes per token ({shares}), "
            f"{total * num_samples / 2**20:,.1f} MiB per step of {num_samples} samples of {num_tokens} tokens"
        )
