"""From an engine's address to a client of its protocol."""

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.client import EngineClient
from glm5_next.launchers.engines.sglang import SGLangClient
from glm5_next.launchers.engines.vllm import VllmClient
from glm5_next.launchers.engines.wire import Address
from glm5_next.launchers.replay_plan import Recording
from glm5_next.launchers.runtime.transformers_engine import stop_tokens
from glm5_next.plugins.config import Glm5NextConfig

CLIENTS: dict[str, type[SGLangClient] | type[VllmClient]] = {"sglang": SGLangClient, "vllm": VllmClient}


def client_of(address: Address, run: RunConfig, model: Glm5NextConfig) -> EngineClient:
    return CLIENTS[address.protocol](
        address,
        model,
        stop_tokens=sorted(stop_tokens(run.model.checkpoint)),
        recording=Recording.of(run.replay),
    )
