"""What each rank is doing, in memory shared with the watching parent, and whose fault it is when nothing moves.

A rank notes every collective before it enters it. The parent can read the notes even after the rank is gone, so a killed,
stopped or looping rank is named together with what it was doing. gloo's own messages name nobody: a rank whose neighbour died
reports a reset connection, and the far ranks only wait.
"""

import ctypes
import mmap
import time
from pathlib import Path

NOTE = 200  # characters of a note
BUSY = 0.05  # CPU seconds a second, of all ranks together, above which something moves


class Slot(ctypes.Structure):
    """One rank's place: written by the rank, read by the parent."""

    _fields_ = [
        ("calls", ctypes.c_long),  # collectives entered
        ("inside", ctypes.c_int),  # in a collective now
        ("slow", ctypes.c_int),  # in a part that may take its time: data, evaluation, checkpoint
        ("steps", ctypes.c_long),  # finished
        ("beat", ctypes.c_double),  # monotonic time of the last sign of life
        ("gap", ctypes.c_double),  # longest time between two signs of life so far, seconds
        ("what", ctypes.c_char * NOTE),
    ]


class Control(ctypes.Structure):
    """What the parent asks for and rank 0 decides."""

    _fields_ = [
        ("interrupted", ctypes.c_int),  # set by the parent: finish the step and save
        ("listening", ctypes.c_int),  # set by a rank: somebody heeds `interrupted`
        ("started", ctypes.c_long),  # steps rank 0 has started
        ("last", ctypes.c_long),  # steps after which to stop; 0: go on
        ("done", ctypes.c_long),  # steps rank 0 has finished
        ("loss", ctypes.c_double),  # of the last of them
    ]


class Board:
    """The shared page: one `Control` and a `Slot` per rank. Made before the fork; anonymous, so nothing is left behind."""

    def __init__(self, ranks: int) -> None:
        self._page = mmap.mmap(-1, ctypes.sizeof(Control) + ranks * ctypes.sizeof(Slot))
        self.control = Control.from_buffer(self._page)
        self.slots = (Slot * ranks).from_buffer(self._page, ctypes.sizeof(Control))
        for slot in self.slots:
            slot.beat = time.monotonic()


class Notes:
    """A rank's own view of its slot."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot

    def beat(self) -> None:
        """A sign of life."""
        now = time.monotonic()
        if not self.slot.slow:
            self.slot.gap = max(self.slot.gap, now - self.slot.beat)
        self.slot.beat = now

    def stepped(self) -> None:
        """A step is done. The first two carry one-time work, so what counts as a long silence is learned from the third on."""
        self.slot.steps += 1
        if self.slot.steps <= 2:
            self.slot.gap = 0.0
        self.beat()

    def enter(self, what: str) -> None:
        """About to enter a collective."""
        self.slot.calls += 1
        self.slot.what = what.encode()[: NOTE - 1]
        self.slot.inside = 1
        self.beat()

    def wait(self, what: str) -> None:
        """About to wait for a collective that was entered before."""
        self.slot.what = what.encode()[: NOTE - 1]
        self.slot.inside = 1
        self.beat()

    def leave(self) -> None:
        """Out of the collective."""
        self.slot.inside = 0
        self.beat()

    def doing(self, what: str, *, slow: bool = False) -> None:
        """In a named part of the work; `slow` parts may be silent for longer."""
        self.beat()
        self.slot.what = what.encode()[: NOTE - 1]
        self.slot.slow = int(slow)


def state(pid: int) -> tuple[str, float]:
    """(process state letter, CPU seconds used); ("X", 0) when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return "X", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / 100.0  # USER_HZ is 100 on Linux


class Watcher:
    """Decides, from notes and process states, whether a rank is lost.

    Args:
        slots: Of all ranks.
        pids: Of all ranks.
        quiet: Seconds without a sign of life after which a stopped rank, or a rank that keeps the others waiting, is given up.
    """

    PATIENCE = 600.0  # seconds for work that cannot be told from progress: a first step, data, one long transfer
    FACTOR = 20.0  # a silence this many times longer than any before is no longer work

    def __init__(self, slots: ctypes.Array, pids: list[int], quiet: float) -> None:
        self.slots, self.pids, self.quiet = slots, pids, quiet
        self._cpu = [(0.0, -1.0)] * len(pids)  # per rank: CPU seconds used and the beat at which that was read
        self._busy = (0.0, 0.0, 0.0)  # when last looked, CPU seconds of all ranks then, when they last moved

    def at(self, rank: int) -> str:
        """What `rank` was doing, in words."""
        slot = self.slots[rank]
        what = slot.what.decode(errors="replace") or "starting"
        return f"{'in' if slot.inside else 'after'} {what} (call {slot.calls})" if slot.calls else f"while {what}"

    def lost(self, left: list[int]) -> tuple[int, str] | None:
        """(rank, why) of the rank to blame among those still running, or None while there is hope."""
        now = time.monotonic()
        for rank in left:
            if state(self.pids[rank])[0] in "Tt" and now - self.slots[rank].beat > self.quiet:
                return rank, f"is stopped (state T) {self.at(rank)}, silent for {now - self.slots[rank].beat:.1f} s"
        if not left or now - max(self.slots[r].beat for r in left) < self.quiet:
            return None
        idle = [r for r in left if not self.slots[r].inside]  # finished ranks are not left
        if idle:
            return self._silent(idle, now)
        calls = {r: self.slots[r].calls for r in range(len(self.pids))}  # finished ranks too: they may have left calls out
        if self._moves(left, now):
            return None
        if len(set(calls.values())) > 1:
            rank = min(calls, key=lambda r: calls[r])
            return rank, f"keeps the others waiting: it is {self.at(rank)}, they are {self._others(rank)}"
        return self._overdue(left, now)

    def _moves(self, left: list[int], now: float) -> bool:
        """Whether a long transfer is under way: ranks that wait for each other in vain use no CPU."""
        then, before, moved = self._busy
        if now - then >= 0.5:
            used = sum(state(self.pids[r])[1] for r in left)
            if not then:  # the first look: one more second tells
                moved = now - self.quiet + 1.0
            elif used - before > BUSY * (now - then):
                moved = now
            self._busy = now, used, moved
        return now - moved < self.quiet

    def _others(self, rank: int) -> str:
        return "; ".join(f"rank {r} {self.at(r)}" for r in range(len(self.pids)) if r != rank)

    def _silent(self, idle: list[int], now: float) -> tuple[int, str] | None:
        """A rank outside every collective while nothing moves: it works, loops or sleeps. Its own CPU clock decides."""
        rank = min(idle, key=lambda r: self.slots[r].calls)
        slot = self.slots[rank]
        kind, cpu = state(self.pids[rank])
        if self._cpu[rank][1] != slot.beat:
            self._cpu[rank] = cpu, slot.beat
        worked = cpu - self._cpu[rank][0]
        known = slot.steps >= 3 and not slot.slow
        patience = max(self.quiet, self.FACTOR * max(s.gap for s in self.slots)) if known else self.PATIENCE
        silent = worked if kind == "R" and known else now - slot.beat
        if silent < patience and now - slot.beat < self.PATIENCE:
            return None
        return (
            rank,
            f"made no progress for {now - slot.beat:.0f} s {self.at(rank)} (process state {kind}); {self._others(rank)}",
        )

    def _overdue(self, left: list[int], now: float) -> tuple[int, str] | None:
        rank = left[0]
        if now - max(self.slots[r].beat for r in left) < self.PATIENCE:
            return None
        return rank, f"and all others wait in one collective for {self.PATIENCE:.0f} s: {self.at(rank)}"
