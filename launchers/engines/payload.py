"""What engines send beside tokens, decoded from bytes and checked; nothing here can run code.

SGLang 0.5.23 sends the experts of a token as base64 of raw C-order int32 without a shape, vLLM 0.33 as base64 of the bytes
of a `.npy` file. Both have a row for every token that was fed to the model (all but the last), every decoder layer (dense
ones are zero) and every expert of a token.
"""

import base64
import binascii
import io

import numpy as np

from glm5_next.launchers.engines.wire import Malformed
from glm5_next.plugins.config import Glm5NextConfig

NPY_DTYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))


def routes_from_int32(text: str, rows: int, model: Glm5NextConfig, where: str) -> np.ndarray:
    """int16 [rows, MoE layers, topk] from SGLang's payload; raises Malformed."""
    raw, shape = _decoded(text, where), (rows, model.num_layers, model.num_experts_per_token)
    if len(raw) != 4 * int(np.prod(shape)):
        raise Malformed(f"{where}: {len(raw)} bytes of routed experts, expected int32 {shape}")
    return _moe_rows(np.frombuffer(raw, dtype="<i4").reshape(shape), model, where)


def routes_from_npy(text: str, rows: int, model: Glm5NextConfig, where: str) -> np.ndarray:
    """int16 [rows, MoE layers, topk] from vLLM's payload; raises Malformed.

    Only the header is parsed, before anything is allocated. An object array (which holds a pickle) has no dtype of ours.
    """
    shape = (rows, model.num_layers, model.num_experts_per_token)
    file = io.BytesIO(_decoded(text, where))
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[
            version
        ]
        found, fortran, dtype = read_header(file)
    except (ValueError, LookupError, SyntaxError, TypeError) as error:
        raise Malformed(f"{where}: routed experts are no .npy file ({type(error).__name__})") from None
    raw = file.read()
    if found != shape or fortran or dtype not in NPY_DTYPES or len(raw) != dtype.itemsize * int(np.prod(shape)):
        raise Malformed(f"{where}: routed experts are {dtype} {found} in {len(raw)} bytes, expected {shape}")
    return _moe_rows(np.frombuffer(raw, dtype=dtype).reshape(shape), model, where)


def _decoded(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Malformed(f"{where}: routed experts are not base64") from None


def _moe_rows(array: np.ndarray, model: Glm5NextConfig, where: str) -> np.ndarray:
    """The MoE layers' rows; raises Malformed for experts that cannot be, and for the zeros of a backend that records none."""
    moe = np.array([kind == "moe" for kind in model.mlp_kinds])
    routes = array[:, moe]
    if routes.size and (routes.min() < 0 or routes.max() >= model.num_experts):
        raise Malformed(f"{where}: routed experts from {routes.min()} to {routes.max()} of {model.num_experts}")
    same = np.sort(routes, axis=-1)
    repeated = (same[..., 1:] == same[..., :-1]).any(axis=-1)
    if repeated.any():
        row, layer = np.argwhere(repeated)[0]
        raise Malformed(
            f"{where}: an expert twice in row {row}, MoE layer {layer} ({int(repeated.sum())} such rows); "
            "the engine's MoE backend does not record routes"
        )
    return routes.astype(np.int16)
