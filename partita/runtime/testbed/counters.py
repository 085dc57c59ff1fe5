"""What an interface of this process's namespace has really carried, as the kernel counts it.

A large frame that is cut later, or by the other side, counts once and has one header, so headers are subtracted by the frame.
"""

from dataclasses import dataclass
from pathlib import Path

HEADERS = 66  # bytes: Ethernet 14, IPv4 20, TCP 20 and its timestamps 12


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes and frames an interface sent so far."""

    nbytes: int
    frames: int

    @property
    def payload(self) -> int:
        """Bytes without the headers of TCP over IPv4."""
        return self.nbytes - HEADERS * self.frames

    def __sub__(self, before: "Carried") -> "Carried":
        return Carried(self.nbytes - before.nbytes, self.frames - before.frames)


def carried(interface: str) -> Carried:
    """What `interface`, of the namespace this thread is in, has sent.

    Raises:
        KeyError: If there is no such interface.
    """
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]
    rows = {name.strip(): fields.split() for name, _, fields in (line.partition(":") for line in lines)}
    return Carried(int(rows[interface][8]), int(rows[interface][9]))
