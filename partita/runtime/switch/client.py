"""A worker's end of a switch: hands values over on a UDP socket and waits for their sums."""

import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from partita.errors import RunFailed
from partita.program.switched import BLOCK
from partita.runtime.switch.blocks import NotFinite, in_blocks
from partita.runtime.switch.faults import BadLink, Faults
from partita.runtime.switch.packets import Line, from_bytes, size_of, to_bytes
from partita.runtime.switch.protocol import DATA, MAX, POOL, SMALL, SUM, Form, Lanes, Packet, Stuck, Timer, Worker

SO_NO_CHECK = 11  # asm-generic/socket.h: the switch changes what a checksum would cover
ROOM = 4 << 20
LARGEST = (1 << 31) - 1
SLAB = BLOCK * BLOCK  # values summed at a time: one packet has the exponents of all their blocks, and little memory is used


@dataclass(frozen=True)
class Address:
    """Where a switch is.

    Args:
        host, port: It listens there.
        cookie: It answers to this.
        answers: The port all its workers listen on; None where it answers to whatever port they have.
    """

    host: str
    port: int
    cookie: int
    answers: int | None = None


class Client:
    """One worker of one group.

    Args:
        address: Of the switch.
        job: Number of the group.
        worker, workers: This one's number in it, and how many there are.
        faults: Of its link, for tests.
        patience: Seconds after which workers that are waited for count as stuck.
        least: Seconds it waits at least before it sends again: a busy machine lets a process wait for its turn.
    """

    def __init__(
        self,
        address: Address,
        job: int,
        worker: int,
        workers: int,
        *,
        faults: Faults | None = None,
        patience: float = 600.0,
        least: float = 0.05,
    ) -> None:
        self.address, self.line, self.worker, self.workers = address, Line(address.cookie, job), worker, workers
        self.ends = {form: Worker(form, worker, workers, timer=Timer(least), patience=patience) for form in (SMALL, POOL)}
        self.sent = self.received = self.strangers = 0  # bytes of packets, both ways; packets that are not ours
        bad = faults or Faults()
        self._out, self._in = (None, None) if bad.none else (BadLink(bad, worker), BadLink(bad, worker + workers))
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for option in (socket.SO_REUSEADDR, socket.SO_BROADCAST, SO_NO_CHECK):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM)
        self._socket.bind(("", address.answers) if address.answers else (_local(address.host), 0))
        self._socket.settimeout(0)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def close(self) -> None:
        self._socket.close()

    # ---- whole numbers
    def start(self, values: Lanes) -> "Started":
        """Hand over up to any number of int32 values in the small form, eight to a packet."""
        rows = _rows(values, SMALL.lanes)
        started = Started(self.ends[SMALL].hand_over(rows, DATA), len(values))
        self._send_due(SMALL, time.monotonic())
        return started

    def finish(self, started: "Started") -> Lanes:
        """The sums of what was started."""
        return np.concatenate(self._until(SMALL, started.numbers))[: started.count]

    def all_reduce_small(self, values: Lanes) -> Lanes:
        """Sums of int32 values over the group, by packets of 64 bytes."""
        return self.finish(self.start(values))

    def all_reduce_pool(self, rows: Lanes, kind: int = SUM) -> Lanes:
        """Sums, or maxima, of rows of 256 int32 values."""
        return np.stack(self._until(POOL, self.ends[POOL].hand_over(rows, kind)))

    # ---- floats
    def all_reduce(self, values: NDArray) -> NDArray:
        """Sums of floats, in block floating point; in the dtype they came in.

        Raises:
            NotFinite: If a value is none.
        """
        out = np.empty_like(values)
        for at in range(0, len(values), SLAB):
            try:
                out[at : at + SLAB] = in_blocks(values[at : at + SLAB], self.workers, self._maxima, self.all_reduce_pool)
            except NotFinite as bad:
                raise NotFinite(at + bad.at, bad.value) from None
        return out

    def _maxima(self, values: Lanes) -> Lanes:
        return self.all_reduce_pool(_rows(values, BLOCK), MAX).reshape(-1)[: len(values)]

    # ---- the link
    def _until(self, form: Form, numbers: Sequence[int]) -> list[Lanes]:
        end, wanted = self.ends[form], len(numbers)
        now = time.monotonic()
        while True:
            self._send_due(form, now)
            left = wanted - sum(n in end.sums for n in numbers) if len(end.sums) >= wanted else 1
            if not left:
                found = end.take(numbers)
                assert found is not None
                return found
            self._poll.poll(min(max(0.0, end.due_first - now), 0.2) * 1e3 + 0.5)
            now = time.monotonic()
            self._receive(now)

    def _send_due(self, form: Form, now: float) -> None:
        try:
            for packet in self.ends[form].sends(now):
                self._send(packet, form)
        except Stuck as stuck:
            raise RunFailed(_stuck(stuck, self)) from None

    def _send(self, packet: Packet, form: Form) -> None:
        self.sent += size_of(form)
        for one in self._out.through(packet) if self._out else (packet,):
            try:
                self._socket.sendto(to_bytes(one, form, self.line), (self.address.host, self.address.port))
            except (BlockingIOError, ConnectionRefusedError):  # as good as lost on the way
                continue

    def _receive(self, now: float) -> None:
        while True:
            try:
                raw = self._socket.recv(2048)
            except (BlockingIOError, ConnectionRefusedError):
                return
            found = from_bytes(raw)
            if found is None or found[0].cookie != self.line.cookie:
                self.strangers += 1
                continue
            if found[0] != self.line:  # an answer to another group, which all ports see
                continue
            self.received += len(raw)
            _, form, packet = found
            for one in self._in.through(packet) if self._in else (packet,):
                ack = self.ends[form].receive(one, now)
                if ack is not None:
                    self._send(ack, form)


@dataclass(frozen=True)
class Started:
    """Values handed over: the numbers of their packets, and how many they are."""

    numbers: list[int]
    count: int


def fits(values: Lanes, workers: int) -> bool:
    """Whether a sum of such values over the workers cannot overflow."""
    return int(np.abs(values.astype(np.int64)).max(initial=0)) <= LARGEST // workers


def _rows(values: Lanes, lanes: int) -> Lanes:
    rows = np.zeros((-(-len(values) // lanes), lanes), np.int32)
    rows.reshape(-1)[: len(values)] = values
    return rows


def _local(host: str) -> str:
    """The address to bind to: nothing outside of this machine reaches a switch on its loopback."""
    return host if host.startswith("127.") else ""


def _stuck(stuck: Stuck, client: Client) -> str:
    where = f"switch at {client.address.host}:{client.address.port}"
    if not stuck.missing:
        return f"the {where} did not answer worker {client.worker} in {stuck.attempts} attempts over {stuck.waited:.1f} s"
    names = ", ".join(map(str, stuck.missing))
    return f"the {where} has waited {stuck.waited:.1f} s for worker {names} of {client.workers}"
