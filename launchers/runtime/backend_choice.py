"""Prints, as JSON, the devices there are and which backend each operator of the released model would run on.

A program of its own (`python -m`), so that a broken torch is a finding of `doctor` and not its end.
"""

import json

import torch

from glm5_next.launchers.presets import RELEASED_CONFIG
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.kernels.registry import Place, choose


def main() -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    place = Place(
        Glm5NextConfig.from_hf(RELEASED_CONFIG),
        torch.bfloat16,
        "cuda" if gpus else "cpu",
        torch.cuda.get_device_capability() if gpus else None,
    )
    names = [torch.cuda.get_device_name(number) for number in range(gpus)]
    print(json.dumps({"gpus": names, "backends": choose({}, place)}))


if __name__ == "__main__":
    main()
