"""What the driver and trainer rank 0 tell each other about an update of servers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glm5_next.launchers.config import RunConfig
from glm5_next.launchers.engines.wire import Address


@dataclass(frozen=True)
class Order:
    """An update that trainer rank 0 carries out. `fresh` engines have to be proved to take every tensor."""

    addresses: tuple[Address, ...]
    fresh: frozenset[str]
    version: int
    run: RunConfig
    folder: Path  # for rollout.transport = "disk"
    # for rollout.placement = "colocated": checksums of what an engine was started with, by name
    started: Mapping[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of it: bytes of one copy, and why engines failed, by name. If any failed, none holds the new weights."""

    num_bytes: int
    failed: dict[str, str]
