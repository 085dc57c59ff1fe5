"""Bytes this process really sent, read from TCP_INFO of its own sockets; no privilege needed.

    sent = bytes_sent - bytes_retrans + notsent_bytes        what the program wrote, whatever is still on its way

Resent bytes are taken out (loopback may resend under load). Sockets that came with the fork are the parent's and left out.
NCCL does not use these sockets for its payload: there is nothing to count then.

Source: `struct tcp_info` in linux/tcp.h, Linux 4.19 on (fields are only ever added at its end).
"""

import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

TCP_INFO, SIZE = 11, 216  # option of getsockopt at IPPROTO_TCP; bytes up to and with tcpi_bytes_retrans
NOT_SENT, SENT, RESENT = 144, 200, 208  # offsets of tcpi_notsent_bytes (u32), tcpi_bytes_sent and tcpi_bytes_retrans (u64)


def sent(excluded: frozenset[int] = frozenset(), foreign: frozenset[int] = frozenset()) -> int | None:
    """Bytes sent so far over all TCP sockets of this process.

    Args:
        excluded: Ports that are no traffic of ours, at either end.
        foreign: Inodes of sockets that are not ours.

    Returns:
        None where they cannot be read.
    """
    if sys.platform != "linux":
        return None
    total = 0
    for number, inode in _sockets("self"):
        if inode in foreign:
            continue
        try:
            with socket.socket(fileno=os.dup(number)) as one:
                total += _sent(one, excluded)
        except OSError:  # closed meanwhile, or not connected
            continue
    return total


def inherited() -> frozenset[int]:
    """Inodes of the sockets this process shares with its parent."""
    mine = {inode for _, inode in _sockets("self")}
    return frozenset(inode for _, inode in _sockets(str(os.getppid())) if inode in mine)


def _sockets(process: str) -> Iterator[tuple[int, int]]:
    """(file descriptor, inode) of the sockets of a process; nothing where that cannot be read."""
    try:
        entries = list(Path(f"/proc/{process}/fd").iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            status = entry.stat()
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            yield int(entry.name), status.st_ino


def _sent(one: socket.socket, excluded: frozenset[int]) -> int:
    if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
        return 0
    if one.getsockname()[1] in excluded or one.getpeername()[1] in excluded:
        return 0
    raw = one.getsockopt(socket.IPPROTO_TCP, TCP_INFO, SIZE)
    if len(raw) < SIZE:
        return 0
    (waiting,) = struct.unpack_from("I", raw, NOT_SENT)
    (all_sent,), (resent,) = struct.unpack_from("Q", raw, SENT), struct.unpack_from("Q", raw, RESENT)
    return all_sent - resent + waiting


class Wire:
    """Adds up what is sent between `start` and `stop`.

    Args:
        excluded: Ports that are no traffic of ours (the store's).
        readable: False where sockets tell nothing (NCCL).
        datagrams: Bytes sent so far over sockets that do not count by themselves.
    """

    def __init__(
        self, excluded: frozenset[int] = frozenset(), *, readable: bool = True, datagrams: Callable[[], int] = lambda: 0
    ) -> None:
        self.datagrams = datagrams
        self.excluded, self.readable = excluded, readable and sys.platform == "linux"
        self.reason = (
            ""
            if self.readable
            else "NCCL's bytes cannot be counted"
            if not readable
            else "sockets tell their bytes on Linux only"
        )
        self.total = 0
        self._foreign = inherited() if self.readable else frozenset()
        self._since: int | None = None

    def start(self) -> None:
        """Count from here."""
        self._since = self._sent() if self.readable else None

    def stop(self) -> None:
        """Count up to here."""
        now = self._sent() if self._since is not None else None
        if now is not None and self._since is not None:
            self.total += now - self._since
        self._since = None

    def _sent(self) -> int | None:
        over = sent(self.excluded, self._foreign)
        return None if over is None else over + self.datagrams()
