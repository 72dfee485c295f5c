"""Which network interface a job's processes talk over. Needs no torch."""

import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

ROUTES = Path("/proc/net/route")


@dataclass(frozen=True)
class Interface:
    """An IPv4 interface that is up."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        return self.address.startswith("127.")


def interfaces() -> list[Interface]:
    """All IPv4 interfaces that are up, by name."""
    states = psutil.net_if_stats()
    return [
        Interface(name, address.address)
        for name, addresses in sorted(psutil.net_if_addrs().items())
        for address in addresses
        if address.family == socket.AF_INET and name in states and states[name].isup
    ]


def choose_interface(wanted: str | None, known: list[Interface] | None = None) -> Interface:
    """The interface called `wanted`; else the default route's, or the only one there is, or loopback if it is alone.

    Raises ValueError that lists what there is.
    """
    known = interfaces() if known is None else known
    listed = ", ".join(f"{item.name} ({item.address})" for item in known) or "none"
    if wanted is not None:
        for item in known:
            if item.name == wanted:
                return item
        raise ValueError(f"network interface {wanted!r} is not there or has no IPv4 address; there are: {listed}")
    outward = [item for item in known if not item.is_loopback]
    default = default_route()
    for item in outward:
        if item.name == default:
            return item
    if len(outward) > 1:
        raise ValueError(f"no default route, and several network interfaces: {listed}; name one with --interface")
    if not known:
        raise ValueError("no network interface is up")
    return (outward or known)[0]


def default_route() -> str | None:
    """The interface of the default route with the smallest metric."""
    if not ROUTES.exists():
        return None
    rows = [line.split() for line in ROUTES.read_text().splitlines()[1:]]
    defaults = [(int(row[6]), row[0]) for row in rows if len(row) > 7 and int(row[1], 16) == int(row[7], 16) == 0]
    return min(defaults)[1] if defaults else None


def listening_socket(address: str) -> socket.socket:
    """A socket that listens on this address only, at a port of the system's choice."""
    listener = socket.create_server((address, 0), backlog=128)
    assert listener.getsockname()[0] == address
    return listener
