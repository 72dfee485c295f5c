"""Megatron-Core in a command's own process, on the CPU."""


def use_cpu() -> None:
    """Installs the CPU runtime, without Megatron's news about absent GPU libraries. Imports torch and Megatron."""
    import logging
    import warnings

    import torch

    from glm5_next.plugins import cpu_runtime

    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    cpu_runtime.install()
