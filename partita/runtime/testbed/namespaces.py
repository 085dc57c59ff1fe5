"""Network namespaces without a name: each lives as long as a process is in it or holds its descriptor.

A namespace belongs to a thread, so what is done inside one is done on a thread of its own, and this process stays where it is.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

CLONE_NEWNET = 0x40000000  # linux/sched.h
NET_ADMIN, SYS_ADMIN = 12, 21  # linux/capability.h: links and limits; namespaces
T = TypeVar("T")


class Namespace:
    """A network namespace of its own, with nothing in it but a loopback that is down.

    Raises:
        OSError: If the system does not give one.
    """

    def __init__(self) -> None:
        self.descriptor = _on_a_thread(_made)

    @property
    def path(self) -> str:
        """Where other programs find it while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def inside(self, call: Callable[[], T]) -> T:
        """What `call` returns or raises, run inside by a thread; a program it starts starts inside."""

        def work() -> T:
            self.enter()
            return call()

        return _on_a_thread(work)

    def enter(self) -> None:
        """Move the calling thread, and the threads it makes from now on, inside."""
        _check(_libc().setns(self.descriptor, CLONE_NEWNET), "setns")

    def close(self) -> None:
        """Hold it no longer."""
        os.close(self.descriptor)


def capable() -> bool:
    """Whether this process may make namespaces, links and limits."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    held = int(next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0"), 16)
    return all(held >> bit & 1 for bit in (NET_ADMIN, SYS_ADMIN))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _made() -> int:
    _check(_libc().unshare(CLONE_NEWNET), "unshare")
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _on_a_thread(call: Callable[[], T]) -> T:
    done: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="namespace")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]
