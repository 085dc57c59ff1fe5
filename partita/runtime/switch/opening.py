"""Which data plane a run has: XDP on a testbed that can carry it, else a UDP socket, with the reason said."""

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from partita.runtime.switch.client import Address
from partita.runtime.switch.loading import Kernel, NoPlane
from partita.runtime.switch.packets import PORT
from partita.runtime.switch.server import Server
from partita.runtime.testbed import Network
from partita.runtime.testbed.hosts import SWITCH

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Opened:
    """A switch that is up.

    Args:
        address: For its workers.
        plane: "udp" or "xdp".
        data_plane: What does the work; it counts.
        note: Why it is not the plane that was asked for.
    """

    address: Address
    plane: str
    data_plane: Server | Kernel
    note: str | None = None

    @property
    def counts(self) -> dict[str, int]:
        return self.data_plane.counts


@contextmanager
def opened(plane: str, network: Network | None, workers: int, jobs: int = 1) -> Iterator[Opened]:
    """A switch for `jobs` groups of `workers` each.

    Args:
        plane: "udp", or "xdp" where that can be had.
        network: The testbed whose switch it is; None puts it on the loopback.
    """
    cookie, note = secrets.randbits(32), None
    if plane == "xdp":
        try:
            if network is None:
                raise NoPlane("it needs the ports of a testbed's switch")
            kernel = Kernel(network, cookie, workers, jobs)
        except NoPlane as why:
            note = f"reduced over UDP: XDP cannot be had here: {why}"
        else:
            try:
                yield Opened(Address(SWITCH, PORT, cookie, PORT), "xdp", kernel)
            finally:
                kernel.close()
            return
    bound = network.switch.inside(lambda: _bound(SWITCH, PORT)) if network else _bound(LOOPBACK, 0)
    server = Server(bound, cookie, workers, jobs)
    server.start()
    host, port = bound.getsockname()
    try:
        yield Opened(Address(host, port, cookie), "udp", server, note)
    finally:
        server.stop()


def _bound(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((host, port))
    return made
