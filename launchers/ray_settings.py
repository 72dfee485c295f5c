"""How Ray is started, alone or by a Slurm job: its ports, its memory and its key. Needs neither Ray nor torch.

Ray 2.60's GCS, raylets and workers listen on every interface, whatever address they are given, and have no setting for
it. So every Ray that we start asks for a key (Ray's token authentication): calls without it are refused.
"""

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

OBJECT_STORE_BYTES = 512 * 2**20
# Below the range that systems hand out by themselves (32768 and up on Linux).
FIRST_PORT, BLOCK, NUM_BLOCKS = 10000, 100, 220
FIXED = (
    "port",
    "node-manager-port",
    "object-manager-port",
    "ray-client-server-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "dashboard-port",
)


@dataclass(frozen=True)
class Ports:
    """A job's own block of ports, the same on all its nodes. Jobs whose numbers are close never share one."""

    first: int

    @classmethod
    def of_job(cls, job_id: int) -> "Ports":
        return cls(FIRST_PORT + job_id % NUM_BLOCKS * BLOCK)

    @property
    def gcs(self) -> int:
        return self.first

    def arguments(self) -> list[str]:
        """Of `ray start`, without the head's own port, which `ray symmetric-run` takes from the address."""
        fixed = [f"--{name}={self.first + number}" for number, name in enumerate(FIXED) if name != "port"]
        workers = [f"--min-worker-port={self.first + len(FIXED)}", f"--max-worker-port={self.first + BLOCK - 1}"]
        return fixed + workers

    def check_free(self, address: str) -> None:
        """Raises ValueError that names a port somebody else listens on."""
        for port in range(self.first, self.first + len(FIXED)):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what is closing does not count
                try:
                    probe.bind((address, port))
                except OSError as error:
                    raise ValueError(f"port {port} on {address}, of this job's own block, is taken ({error})") from None


def ask_for_a_key() -> None:
    """Makes the Ray that this process may start ask for a new key, which its processes inherit in their environment.

    Has to come before Ray is imported, which reads the variables once. Does nothing if Ray is there already, or where
    the user has chosen otherwise.
    """
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ and existing_cluster(os.environ) is None:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def write_key(path: Path) -> None:
    """A new key in a file that only its owner reads."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def key_file_environment(path: Path) -> dict[str, str]:
    """The same for all nodes of a job: they read the key from a file."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def existing_cluster(environment: Mapping[str, str]) -> str | None:
    """The address of a running Ray that a run is to join (Ray's own variable), or None: it starts one for itself."""
    return environment.get("RAY_ADDRESS") or None
