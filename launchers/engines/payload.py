"""What engines send beside tokens, decoded from bytes and checked; nothing here can run code.

SGLang 0.5.23 sends the experts of a token as base64 of raw C-order int32 without a shape, vLLM 0.33 as base64 of the bytes
of a `.npy` file. Both have a row for every token that was fed to the model (all but the last), every decoder layer (dense
ones are zero) and every expert of a token. The pools that the indexer chose come from our plugins alone: in SGLang's
`indexer_topk` from the first token on that has a choice, in vLLM's file behind the experts.
"""

import base64
import binascii
import io

import numpy as np

from glm5_next.launchers.engines.wire import Malformed
from glm5_next.plugins.config import Glm5NextConfig
from glm5_next.plugins.pick_coding import PickRecord, encode_picks, first_choice, joined, no_picks

NPY_DTYPES = (np.dtype("<u1"), np.dtype("<u2"), np.dtype("<i4"))
POOL_DTYPES = (np.dtype("<i2"), np.dtype("<i4"))
ENCODED_AT_ONCE = 2048  # tokens; each piece needs several copies of itself for a moment


def routes_from_int32(text: str, rows: int, model: Glm5NextConfig, where: str) -> np.ndarray:
    """int16 [rows, MoE layers, topk] from SGLang's payload; raises Malformed."""
    raw, shape = _decoded(text, "routed experts", where), (rows, model.num_layers, model.num_experts_per_token)
    if len(raw) != 4 * int(np.prod(shape)):
        raise Malformed(f"{where}: {len(raw)} bytes of routed experts, expected int32 {shape}")
    return _moe_rows(np.frombuffer(raw, dtype="<i4").reshape(shape), model, where)


def picks_from_raw(text: str, rows: int, model: Glm5NextConfig, where: str) -> PickRecord:
    """The picks of `rows` tokens from what our plugin puts into SGLang's `indexer_topk`; raises Malformed."""
    raw, layers = _decoded(text, "indexer picks", where), _dsa_layers(model)
    shape = (max(0, rows - _first_choice(model)), len(layers), model.num_pools_selected)
    if len(raw) == 4 * rows * model.num_layers * model.index_topk:
        raise Malformed(
            f"{where}: indexer picks as SGLang itself sends them, zeros for a pooled indexer; the server has not loaded "
            "this package's plugin (is glm5-next installed where SGLang is, and in SGLANG_PLUGINS if that is set?)"
        )
    for dtype in POOL_DTYPES:
        if len(raw) == dtype.itemsize * int(np.prod(shape)):
            return _picks(np.frombuffer(raw, dtype=dtype).reshape(shape), rows, model, where)
    raise Malformed(f"{where}: {len(raw)} bytes of indexer picks, expected int16 or int32 {shape}")


def routes_from_npy(text: str, rows: int, model: Glm5NextConfig, where: str) -> np.ndarray:
    """int16 [rows, MoE layers, topk] from vLLM's payload; raises Malformed."""
    shape = (rows, model.num_layers, model.num_experts_per_token)
    return _moe_rows(_npy_array(text, shape, NPY_DTYPES, where), model, where)


def routes_and_picks_from_npy(text: str, rows: int, model: Glm5NextConfig, where: str) -> tuple[np.ndarray, PickRecord]:
    """The same and the picks, from vLLM with our plugin; raises Malformed."""
    experts = (model.num_layers, model.num_experts_per_token)
    pools = (len(_dsa_layers(model)), model.num_pools_selected)
    line = _npy_array(text, (rows, int(np.prod(experts)) + int(np.prod(pools))), POOL_DTYPES, where)
    routes, picks = line[:, : int(np.prod(experts))], line[:, int(np.prod(experts)) :]
    first = min(rows, _first_choice(model))
    return _moe_rows(routes.reshape(rows, *experts), model, where), _picks(
        picks[first:].reshape(rows - first, *pools), rows, model, where
    )


def _npy_array(text: str, shape: tuple[int, ...], dtypes: tuple[np.dtype, ...], where: str) -> np.ndarray:
    """Only the header is parsed, before anything is allocated. An object array (which holds a pickle) has no dtype of ours."""
    file = io.BytesIO(_decoded(text, "routed experts", where))
    try:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[
            version
        ]
        found, fortran, dtype = read_header(file)
    except (ValueError, LookupError, SyntaxError, TypeError) as error:
        raise Malformed(f"{where}: routed experts are no .npy file ({type(error).__name__})") from None
    raw = file.read()
    if found != shape or fortran or dtype not in dtypes or len(raw) != dtype.itemsize * int(np.prod(shape)):
        hint = ""
        if len(shape) == 2 and len(found) == 3:
            hint = ": no indexer picks beside them, the server runs without this package's plugin or its option"
        raise Malformed(f"{where}: routed experts are {dtype} {found} in {len(raw)} bytes, expected {shape}{hint}")
    return np.frombuffer(raw, dtype=dtype).reshape(shape)


def _picks(pools: np.ndarray, rows: int, model: Glm5NextConfig, where: str) -> PickRecord:
    """`pools` of the tokens that have a choice, after those that have none; raises Malformed for what is no choice."""
    layers, kpool, first = _dsa_layers(model), model.index_kpool, min(rows, _first_choice(model))
    try:
        pieces = [
            encode_picks(
                pools[start : start + ENCODED_AT_ONCE], layers=layers, kpool=kpool, first=first + start, name=where
            )
            for start in range(0, len(pools), ENCODED_AT_ONCE)
        ]
    except ValueError as error:
        raise Malformed(str(error)) from None
    return joined([no_picks(first, layers, model.num_pools_selected, kpool), *pieces])


def _dsa_layers(model: Glm5NextConfig) -> tuple[int, ...]:
    return tuple(number for number, kind in enumerate(model.attention_kinds) if kind == "dsa")


def _first_choice(model: Glm5NextConfig) -> int:
    return first_choice(model.index_kpool, model.num_pools_selected)


def _decoded(text: str, what: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Malformed(f"{where}: {what} are not base64") from None


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
