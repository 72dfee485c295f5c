"""What SGLang 0.5.23 does with weights and their memory, on a `ModelHost`.

Names that no tensor has are skipped without a word; so are q_a_proj and kv_a_proj_with_mqa of a layer unless they come in one
call. Where a real server would end itself (memory released while busy or taken back twice) this one answers with an error.
"""

import base64
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_next.launchers.engines.client import Meeting, TensorList
from glm5_next.launchers.engines.tiny_host import MEMORY, ModelHost
from glm5_next.launchers.engines.tiny_payload import bucket_of_sglang
from glm5_next.launchers.engines.weight_group import EngineEnd

Answer = tuple[int, Any]
Items = list[tuple[str, Tensor]]
OK, BAD_REQUEST = 200, 400
FUSED = ("q_a_proj.", "kv_a_proj_with_mqa.")
GROUP_TIMEOUT = timedelta(seconds=600)


class SGLangWeights:
    """The endpoints `do_...` of `SGLangProtocol` that weights go through."""

    group_timeout = GROUP_TIMEOUT

    def __init__(self, host: ModelHost, *, tp: int = 1):
        self.host, self.tp = host, tp
        self.session = False
        self.groups: dict[str, list[EngineEnd]] = {}

    def do_init_weights_update_group(self, body: dict[str, Any]) -> Answer:
        meeting = Meeting(
            body["master_address"], body["master_port"], body["world_size"], body["group_name"], body["backend"]
        )
        try:
            self.groups[meeting.group] = self._ends(meeting, body["rank_offset"])
        except (RuntimeError, ValueError) as error:
            return _done(False, f"Failed to initialize custom process group: {error}.")
        return _done(True, "Succeeded to initialize custom process group.")

    def do_destroy_weights_update_group(self, body: dict[str, Any]) -> Answer:
        if self.groups.pop(body["group_name"], None) is None:
            return _done(False, "The group to be destroyed does not exist.")
        return _done(True, "Succeeded to destroy custom process group.")

    def do_begin_weight_update(self, body: dict[str, Any]) -> Answer:
        if self.session:
            return _done(False, "a weight-update session is already open; call end_weight_update() first")
        self.session = True
        return _done(True, "Success")

    def do_end_weight_update(self, body: dict[str, Any]) -> Answer:
        if not self.session:
            return _done(False, "no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return _done(True, "Success")

    def do_update_weights_from_distributed(self, body: dict[str, Any]) -> Answer:
        if not self.session:
            return _done(
                False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        tensors = TensorList(tuple(body["names"]), tuple(body["dtypes"]), tuple(map(tuple, body["shapes"])))
        try:
            with ThreadPoolExecutor(self.tp) as ranks:
                items, *others = ranks.map(lambda end: list(end.received(tensors)), self.groups[body["group_name"]])
        except (RuntimeError, KeyError) as error:
            return _done(False, f"Failed to receive weights: {error}")
        return self._received(body, items, others)

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> Answer:
        if not self.session:
            return _done(
                False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )
        payloads = [base64.b64decode(text) for text in body["serialized_named_tensors"]]
        try:
            items, *others = [bucket_of_sglang(payloads[rank]) for rank in range(self.tp)]
        except (ValueError, LookupError) as error:
            return _done(False, f"Failed to read the payload: {error}")
        return self._received(body, items, others)

    def do_release_memory_occupation(self, body: dict[str, Any]) -> Answer:
        self.host.release(body.get("tags") or MEMORY)
        return OK, None

    def do_resume_memory_occupation(self, body: dict[str, Any]) -> Answer:
        for tag in body.get("tags") or MEMORY:
            if tag not in self.host.released:
                raise RuntimeError(f"KeyError: {tag!r}")
            self.host.released.remove(tag)
        return OK, None

    def do_update_weights_from_disk(self, body: dict[str, Any]) -> Answer:
        try:
            self.host.load_folder(Path(body["model_path"]))
        except ValueError as error:
            return _done(False, f"Failed to update weights: {error}.")
        return self._updated(body, "Succeeded to update model weights.")

    def do_update_weight_version(self, body: dict[str, Any]) -> Answer:
        if body.get("abort_all_requests", True):
            self.host.abort(None)
        self.host.version = body["new_version"]
        return OK, {"success": True, "message": "", "new_version": body["new_version"]}

    def do_weights_checker(self, body: dict[str, Any]) -> Answer:
        action, skip = body.get("action", "checksum"), body.get("skip_tensor_list") or ()
        if action == "reset_tensors":
            self.host.forget(skip)
            return _done(True, "Success")
        if action == "checksum":
            ranks = [{"checksums": self.host.checksums(skip)}]
            return OK, {"success": True, "message": "Success", "ranks": ranks}
        return _done(False, f"Unsupported action={action!r}")

    def _ends(self, meeting: Meeting, first_rank: int) -> list[EngineEnd]:
        """One for each tensor-parallel rank."""
        with ThreadPoolExecutor(self.tp) as ranks:
            return list(
                ranks.map(lambda rank: EngineEnd(meeting, first_rank + rank, self.group_timeout), range(self.tp))
            )

    def _received(self, body: dict[str, Any], items: Items, others: list[Items]) -> Answer:
        assert all(torch.equal(one[1], other[1]) for rank in others for one, other in zip(items, rank, strict=True))
        self.host.load(_whole_pairs(items))
        return self._updated(body, "Succeeded to update parameter online.")

    def _updated(self, body: dict[str, Any], message: str) -> Answer:
        if body.get("weight_version") is not None:
            self.host.version = body["weight_version"]
        if body.get("flush_cache", True) and not self.host.flush():
            return _done(
                False, "Weights were updated, but the cache was not flushed because requests are still running"
            )
        return _done(True, message)


def _whole_pairs(items: list[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Without halves of the fused projection whose other half did not come in the same call."""
    names = {name for name, _ in items}
    for name, tensor in items:
        here, other = FUSED if FUSED[0] in name else FUSED[::-1]
        if here not in name or name.replace(here, other) in names:
            yield name, tensor


def _done(success: bool, message: str) -> Answer:
    return OK if success else BAD_REQUEST, {"success": success, "message": message}
