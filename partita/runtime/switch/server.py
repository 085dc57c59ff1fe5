"""The switch as a thread of the command, behind a UDP socket: where there is no XDP. The same rules, the same packets."""

import socket
import threading
from collections import Counter

from partita.runtime.switch.packets import Line, from_bytes, to_bytes
from partita.runtime.switch.protocol import ACK, DATA, MAX, POOL, SMALL, SUM, Form, Packet, Slots

KINDS = {SMALL: (DATA, ACK), POOL: (SUM, MAX)}
ROOM = 4 << 20  # bytes the socket may hold: all workers' windows
LOOK = 0.2  # seconds between two looks at whether it is over


class Server:
    """A switch for some groups of workers.

    Args:
        bound: A socket bound to where they send.
        cookie: Of its own.
        workers, jobs: Of each group, and groups.
    """

    def __init__(self, bound: socket.socket, cookie: int, workers: int, jobs: int = 1) -> None:
        self.socket, self.cookie, self.workers, self.jobs = bound, cookie, workers, jobs
        self.slots = {(job, form): Slots(form, workers) for job in range(jobs) for form in (SMALL, POOL)}
        self.where: dict[int, dict[int, tuple[str, int]]] = {job: {} for job in range(jobs)}
        self.strangers = 0
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        bound.settimeout(LOOK)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the socket."""
        self._ended.set()
        self._thread.join()
        self.socket.close()

    @property
    def counts(self) -> dict[str, int]:
        """What happened so far: sums, copies, late and stale packets, those of strangers."""
        total: Counter[str] = sum((s.counts for s in self.slots.values()), Counter())
        return {**total, "strangers": self.strangers}

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                raw, sender = self.socket.recvfrom(2048)
            except TimeoutError:
                continue
            self._answer(raw, sender)

    def _answer(self, raw: bytes, sender: tuple[str, int]) -> None:
        found = from_bytes(raw)
        if found is None or not self._ours(*found):
            self.strangers += 1
            return
        line, form, packet = found
        at = self.where[line.job]
        at[packet.worker] = sender
        answer = self.slots[line.job, form].receive(packet)
        if answer is None:
            return
        out = to_bytes(answer.packet, form, line)
        for place in at.values() if answer.asker is None else [at[answer.asker]]:
            self.socket.sendto(out, place)

    def _ours(self, line: Line, form: Form, packet: Packet) -> bool:
        known = line.cookie == self.cookie and line.job < self.jobs
        return known and packet.worker < self.workers and packet.kind in KINDS[form]
