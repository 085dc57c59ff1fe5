"""Holds every frame between two ends of a link for a while: netem is not in every kernel.

    TAP in the host ──▶ queue, each frame with the time it is due ──▶ TAP in the switch        and the same back

A thread of the command does it, so it ends with the command. Large frames stay in one piece (the header in front of each says
how a device would cut them), which makes a frame of the relay up to 64 KiB.
"""

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # linux/if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
OFFLOADS = 0x1 | 0x2 | 0x4  # checksums, TCP over IPv4 and IPv6
LARGEST = 66_000  # bytes of a frame with its header
AT_ONCE = 64  # frames read before the other ends get their turn


def tap(name: str) -> int:
    """The descriptor of a new TAP device in this thread's namespace; the device is gone when it is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, OFFLOADS)
    return descriptor


class Relay:
    """Passes frames on between pairs of TAPs.

    Args:
        pairs: Descriptors of the two ends of each link.
        delay: Seconds each frame is held.
    """

    def __init__(self, pairs: list[tuple[int, int]], delay: float) -> None:
        self.delay = delay
        self.other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        self.held: deque[tuple[float, int, bytes]] = deque()  # one delay for all, so the first in is the first due
        self._ends = os.pipe()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; frames it holds are lost."""
        os.write(self._ends[1], b".")
        self._thread.join()
        for end in self._ends:
            os.close(end)

    def _run(self) -> None:
        watched = [*self.other, self._ends[0]]
        while True:
            wait = max(0.0, self.held[0][0] - time.monotonic()) if self.held else None
            ready, _, _ = select.select(watched, [], [], wait)
            if self._ends[0] in ready:
                return
            for end in ready:
                self._take(end)
            self._pass_on()

    def _take(self, end: int) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = os.read(end, LARGEST)
            except OSError:  # no more for now, or the device is down
                return
            self.held.append((time.monotonic() + self.delay, self.other[end], frame))

    def _pass_on(self) -> None:
        while self.held and self.held[0][0] <= time.monotonic():
            _, end, frame = self.held.popleft()
            try:
                os.write(end, frame)
            except OSError:  # its queue is full: as on a cable, the frame is lost
                continue
