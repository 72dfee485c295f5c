"""What an engine recorded, checked once per stream before anything uses it. Needs no torch.

Every ValueError names the sample, the layer and the likely cause.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from glm5_next.launchers.replay_plan import ReplayPlan
from glm5_next.launchers.types import Sample
from glm5_next.plugins.pick_coding import PickRecord

Refuse = Callable[[str], ValueError]


def check_record(sample: Sample, plan: ReplayPlan) -> None:
    """Raises ValueError unless the sample carries all that its run replays from the engine, and each stream is right."""

    def refuse(problem: str) -> ValueError:
        return ValueError(f"sample {sample.sample_id!r}: {problem}")

    num_rows, recording = len(sample.tokens) - 1, plan.recording
    if recording.routes:
        check_routes(sample.routes, num_rows, plan, refuse)
    if recording.route_weights:
        check_route_weights(sample.route_weights, sample.routes, plan, refuse)
    if recording.picks:
        check_picks(sample.picks, num_rows, plan, refuse)


def require_streams(sample: Sample, plan: ReplayPlan) -> None:
    """Raises ValueError for a sample without one of the streams that its run replays from the engine."""
    recording = plan.recording
    wanted = {"routes": recording.routes, "route_weights": recording.route_weights, "picks": recording.picks}
    for name, needed in wanted.items():
        if needed and getattr(sample, name) is None:
            raise ValueError(f"sample {sample.sample_id!r}: {_wrong_type(name, None, name)}")


def check_routes(routes: Any, num_rows: int, plan: ReplayPlan, refuse: Refuse) -> None:
    """int16 `[rows, MoE layers, experts per token]` of distinct experts, or -1 in every slot of a token's layer."""
    _check_array("routes", routes, np.int16, (num_rows, *plan.routes_shape), refuse)
    experts = np.sort(routes, axis=-1)
    known = experts[..., 0] >= 0
    some = (experts >= 0).any(-1)
    problems = {
        "names experts that do not exist: ids of another model, or physical ids of replicated experts": (
            (experts[..., -1] >= plan.num_experts) | (experts[..., 0] < -1)
        ),
        "is cut off: -1 in some slots only": some & ~known,
        "names an expert twice: an engine whose MoE kernel bypasses the capture sends zeros": (
            known & (experts[..., 1:] == experts[..., :-1]).any(-1)
        ),
    }
    for problem, wrong in problems.items():
        if wrong.any():
            row, layer = np.argwhere(wrong)[0].tolist()
            raise refuse(
                f"routes of token {row}, layer {plan.moe_layers[layer]} {problem} ({routes[row, layer].tolist()})"
            )
    _check_recorded("routes", known, plan.moe_layers, refuse)


def check_route_weights(weights: Any, routes: Any, plan: ReplayPlan, refuse: Refuse) -> None:
    """float32 like the routes, finite and not all zero where there is a record."""
    _check_array("route_weights", weights, np.float32, routes.shape, refuse)
    known = routes >= 0
    problems = {
        "are not finite: the engine overflowed, or sent uninitialised memory": ~np.isfinite(weights) & known,
        "are negative: another tensor was sent": (weights < 0) & known,
        "are all zero: the engine does not capture them": np.repeat(
            ((weights == 0) & known).all(-1, keepdims=True) & known.any(-1, keepdims=True), weights.shape[-1], axis=-1
        ),
    }
    for problem, wrong in problems.items():
        if wrong.any():
            row, layer, _ = np.argwhere(wrong)[0].tolist()
            raise refuse(
                f"route_weights of token {row}, layer {plan.moe_layers[layer]} {problem} ({weights[row, layer].tolist()})"
            )


def check_picks(picks: Any, num_rows: int, plan: ReplayPlan, refuse: Refuse) -> None:
    """A record of the sample from its first token on; `encode_picks` has already refused ids that are no choice."""
    if not isinstance(picks, PickRecord):
        raise refuse(_wrong_type("picks", picks, "a PickRecord"))
    if picks.layers != plan.dsa_layers:
        raise refuse(f"picks are of layers {picks.layers}, the model's sparse-attention layers are {plan.dsa_layers}")
    found, wanted = (picks.num_selected, picks.kpool), (plan.num_selected, plan.kpool)
    if found != wanted:
        raise refuse(f"picks are {found[0]} pools of {found[1]} tokens, the model selects {wanted[0]} of {wanted[1]}")
    if (picks.first, picks.num_tokens) != (0, num_rows):
        raise refuse(
            f"picks cover tokens {picks.first} to {picks.first + picks.num_tokens} in every layer, expected 0 to "
            f"{num_rows}: {_why_other_length(picks.num_tokens, num_rows)}"
        )
    choices = np.arange(1, num_rows + 1) // plan.kpool > plan.num_selected
    _check_recorded("picks", ~picks.holes[choices], plan.dsa_layers, refuse)


def _check_array(name: str, array: Any, dtype: type, shape: tuple[int, ...], refuse: Refuse) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        raise refuse(_wrong_type(name, array, str(np.dtype(dtype))))
    if array.shape != shape:
        rows_only = array.shape[1:] == shape[1:]
        cause = (
            _why_other_length(len(array), shape[0])
            if rows_only
            else "the engine counts other layers (dense ones, the MTP layer) or experts per token"
        )
        raise refuse(f"{name} of all layers have shape {array.shape}, expected {shape}: {cause}")


def _wrong_type(name: str, found: Any, wanted: str) -> str:
    if found is None:
        return f"{name} of all layers are missing: the engine was not asked for them, or a proxy before it drops them"
    kind = getattr(found, "dtype", type(found).__name__)
    return f"{name} of all layers are {kind}, expected {wanted}: the payload was decoded as another type"


def _why_other_length(found: int, wanted: int) -> str:
    if found < wanted:
        return "the engine's prefix cache or its start offset left out tokens"
    return "the engine counts the last token, which is never fed to the model, or sends padding"


def _check_recorded(name: str, known: np.ndarray, layers: tuple[int, ...], refuse: Refuse) -> None:
    """`known` `[rows, layers]`: a layer without any record is no gap but a capture that is off."""
    if len(known) and not known.any(0).all():
        layer = layers[int((~known.any(0)).argmax())]
        raise refuse(f"{name} of layer {layer} have no record for any token: the engine does not capture this layer")
