"""Proof that every server holds what the trainer sent, beside the probe that the controller scores.

What an engine reports as checksums is by its own fused and sharded names, so bits cannot be compared name by name. Instead
an engine that joins is filled with noise before its first update. If that update carries the weights it was started from
(version 0), its checksums must come back to what they were: the update writes every tensor, to the bit. Later, engines must
agree with each other, and a layer's checksums change where the trainer's bits changed, and nowhere else.
"""

import re
from collections.abc import Mapping

LAYER = re.compile(r"\blayers\.(\d+)\.")


class EnginesFailed(RuntimeError):
    """Engines that do not hold the new weights, by name, with the reason. No engine of the update may be used then."""

    def __init__(self, reasons: Mapping[str, str]):
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


class Proof:
    """What is known of the checksums of engines and the digests of the trainer."""

    def __init__(self) -> None:
        self.started: dict[str, dict[str, str]] = {}
        self.digests: dict[str, str] = {}
        self.checksums: dict[str, dict[str, str]] = {}

    def check(self, digests: Mapping[str, str], checksums: Mapping[str, dict[str, str]], version: int) -> None:
        """Raises EnginesFailed that names the tensors; remembers both for the next update."""
        failed: dict[str, str] = {}
        first = next(iter(checksums), "")
        for name, held in checksums.items():
            reason = (
                _differences(
                    "is not what it was started with, though version 0 was sent", self.started.get(name, held), held
                )
                or _differences(f"is not that of {first}", checksums[first], held)
                or self._unexpected_changes(name, digests, held)
            )
            if reason:
                failed[name] = f"{name}, weights version {version}: {reason}"
        self.started = {}
        if failed:
            raise EnginesFailed(failed)
        self.digests, self.checksums = dict(digests), dict(checksums)

    def _unexpected_changes(self, name: str, digests: Mapping[str, str], held: Mapping[str, str]) -> str:
        before = self.checksums.get(name)
        if before is None or not self.digests:
            return ""
        sent, changed = changed_parts(self.digests, digests), changed_parts(before, held)
        if sent == changed:
            return ""
        return (
            f"parts of the model changed in the trainer but not here: {sorted(sent - changed)[:5]}; "
            f"here but not in the trainer: {sorted(changed - sent)[:5]}"
        )


def changed_parts(before: Mapping[str, str], after: Mapping[str, str]) -> set[str]:
    """The layers ("layer 3", or "outside layers") of all names whose value is not what it was."""
    names = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    matches = (LAYER.search(name) for name in names)
    return {f"layer {match[1]}" if match else "outside layers" for match in matches}


def _differences(what: str, expected: Mapping[str, str], held: Mapping[str, str]) -> str:
    wrong = sorted(name for name in expected.keys() | held.keys() if expected.get(name) != held.get(name))
    return f"the checksum of {len(wrong)} of {len(held)} tensors {what}, first {wrong[:5]}" if wrong else ""
