"""One number for the bits of a tensor, computed the same way by trainer and engine."""

import hashlib

import torch
from torch import Tensor


def weight_digest(tensor: Tensor, dtype: torch.dtype) -> str:
    """SHA-256 of the tensor's shape and bytes in the dtype it was sent in.

    An engine may hold it in a wider dtype; if it holds a value that the sent dtype cannot express, it does not hold
    what was sent, and the digest says so.
    """
    sent = tensor.detach().to(dtype)
    compared = torch.float32 if tensor.dtype.itemsize == 1 else tensor.dtype  # torch compares no FP8 numbers
    if not torch.equal(sent.to(compared), tensor.detach().to(compared)):
        return f"not a {dtype} tensor"
    raw = sent.contiguous().cpu().view(torch.uint8).numpy()
    return hashlib.sha256(f"{tuple(tensor.shape)} {dtype}".encode() + raw.tobytes()).hexdigest()
