"""Servers on the trainer's GPUs: what is different about starting them."""

from collections.abc import Sequence

from glm5_next.launchers.engines.client import ALL_MEMORY, EngineClient


def environment(engine: str, gpus: Sequence[str]) -> dict[str, str]:
    """The GPUs of its trainer ranks, in their order.

    vLLM reads handles of GPU memory as a pickle, when told to; it comes with the key, like everything it is sent.
    """
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return seen | ({"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if engine == "vllm" else {})


async def first_sleep(client: EngineClient) -> dict[str, str]:
    """Has a server give its memory back as soon as it has started; returns the checksums of what it was started with."""
    try:
        checksums = await client.checksums()
        await client.release(ALL_MEMORY)
        return checksums
    finally:
        await client.close()
