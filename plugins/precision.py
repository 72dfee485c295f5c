"""Tensors that stay in fp32 whatever a wrapper does to the module they live in."""

import torch


class KeepFp32(torch.nn.Module):
    """Mixin: the tensors named in `fp32_tensors` (own parameters and buffers) ignore `.bfloat16()` and `.to(dtype)`.

    Megatron's `Float16Module` casts a whole model and has no mark for exceptions. Casting back afterwards would be too
    late: the bits are gone. So the cast itself is undone here, where every cast passes.
    """

    fp32_tensors: tuple[str, ...] = ()

    def _apply(self, fn, recurse=True):
        before = {name: getattr(self, name).data for name in self.fp32_tensors}
        super()._apply(fn, recurse)
        for name, data in before.items():
            tensor = getattr(self, name)
            if tensor.dtype != torch.float32:
                tensor.data = data.to(tensor.device)
        return self


class Fp32Weight(KeepFp32):
    """A bare fp32 `weight`, for maths that lives in an operator and a name that lives in checkpoints."""

    fp32_tensors = ("weight",)

    def __init__(self, *shape: int, device: torch.device | None = None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))
