"""Our bridge as an mbridge `LLMBridge`, so that `mbridge.AutoBridge.from_pretrained(path)` finds it.

The table, the reader and the exporter are this package's; of mbridge's class only the public behaviour is used.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mbridge.core import LLMBridge, register_model
from torch import Tensor

from glm5_next.bridge.checkpoint import Checkpoint
from glm5_next.bridge.export import export_weights, save_hf_folder
from glm5_next.bridge.load import load_weights
from glm5_next.plugins.chunks import build_chunks, wrap_ddp
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.megatron_config import Glm5NextTransformerConfig, megatron_config
from glm5_next.plugins.spec import build_gpt_model
from glm5_next.plugins.topology import Topology


@register_model(["glm5_next", "glm5_next_text"])
class Glm5NextBridge(LLMBridge):
    """Builds, loads, exports and saves GLM-5.3-Flash on the current Megatron parallel state."""

    TransformerConfigClass = Glm5NextTransformerConfig

    @functools.cached_property
    def model_config(self) -> Glm5NextConfig:
        """From the folder's config.json where there is one: the Hugging Face object has filled in class defaults."""
        name = self.hf_config.name_or_path
        return Glm5NextConfig.from_hf(self._folder(name) if name else self.hf_config.to_dict())

    def _folder(self, path: str) -> Path:
        """A local folder, or where the hub's cache keeps a model of that name."""
        return Path(path) if Path(path).is_dir() else Path(self._get_actual_hf_path(path))

    def _build_config(self) -> Glm5NextTransformerConfig:
        topology = Topology(
            world_size=dist.get_world_size(),
            tp=self.mpu.tp_size,
            pp=self.mpu.pp_size,
            ep=self.mpu.ep_size,
            etp=self.mpu.etp_size,
            vpp=self.mpu.vpp_size,
        )
        on_cpu = dist.get_backend(self.mpu.tp_group) == "gloo"
        return megatron_config(self.model_config, topology, dtype=self.dtype, on_cpu=on_cpu, **self.extra_args)

    def get_model(
        self,
        weight_path: str | None = None,
        wrap_with_ddp: bool = False,
        post_model_creation_callbacks: Sequence[Callable[..., None]] = (),
        ddp_config: dict[str, Any] | None = None,
        fp16: bool = False,
        **unused: Any,
    ) -> list[torch.nn.Module]:
        """This rank's model chunks, filled from `weight_path` if it is given.

        mbridge 0.15.1's own builder names an enum member that Megatron-Core 0.19.2 no longer has. Precision and devices
        follow from the bridge's dtype and the process groups, so mbridge's other arguments have nothing left to say.
        Raises ValueError for fp16, which the model is not trained in.
        """
        if fp16:
            raise ValueError("fp16=True: GLM-5.3-Flash runs in bf16 or fp32; give the bridge dtype=torch.bfloat16")
        chunks = build_chunks(self.config, self._model_provider(post_model_creation_callbacks))
        if weight_path is not None:
            self.load_weights(chunks, weight_path)
        if wrap_with_ddp:
            settings = dict(ddp_config or {})
            distributed = settings.pop("use_distributed_optimizer", False)
            return list(wrap_ddp(chunks, self.config, distributed_optimizer=distributed, **settings))
        return chunks

    def _model_provider(
        self, post_model_creation_callbacks: Sequence[Callable[..., None]]
    ) -> Callable[..., torch.nn.Module]:
        def provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
            model = build_gpt_model(self.config, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
            for callback in post_model_creation_callbacks:
                callback(
                    model,
                    pre_process=pre_process,
                    post_process=post_process,
                    config=self.config,
                    hf_config=self.hf_config,
                )
            return model

        return provider

    def load_weights(
        self, models: Sequence[torch.nn.Module], weights_path: str, memory_efficient: bool = False
    ) -> None:
        """Loads a Hugging Face folder into this rank's chunks; always by byte range, whatever `memory_efficient`."""
        load_weights(models, Checkpoint(self._folder(weights_path)))

    def export_weights(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yields (HF name, tensor) of every trained tensor in the checkpoint's dtypes, on every rank."""
        yield from export_weights(models, self.model_config)

    def save_weights(
        self, models: Sequence[torch.nn.Module], weights_path: str, memory_efficient: bool = False
    ) -> None:
        """Writes a complete Hugging Face folder: trained tensors from the model, the rest from the source folder."""
        source = Checkpoint(self._folder(self.hf_config.name_or_path))
        save_hf_folder(export_weights(models, self.model_config), source, Path(weights_path))
