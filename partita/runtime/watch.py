"""What each rank is doing, in memory shared with the watching parent, and whose fault it is when nothing moves.

A rank notes every collective before it enters it. The parent can read the notes even after the rank is gone, so a killed,
stopped or looping rank is named together with what it was doing. gloo's own messages name nobody: a rank whose neighbour died
reports a reset connection, and the far ranks only wait.

A rank that is silent while the others wait for it is asked where it is, by a signal that Python answers between instructions:

    no answer, CPU used      one long op: work, until `PATIENCE`
    answers, places new      slow, but it gets on
    answers, places known    a loop: given up once it has used far more CPU than any silence before it
    neither answers nor CPU  asleep: given up after a silence far longer than any before
"""

import contextlib
import ctypes
import mmap
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

ASK = signal.SIGURG  # ignored by whoever does not listen
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
        ("used", ctypes.c_double),  # most CPU seconds between two signs of life so far
        ("answers", ctypes.c_long),  # to the parent's asking
        ("fresh", ctypes.c_double),  # monotonic time of the last answer from a place not seen in this silence
        ("what", ctypes.c_char * NOTE),
        ("where", ctypes.c_char * NOTE),  # the line of the last answer
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
        self._used = time.process_time()
        self._silence = slot.beat  # the sign of life before the silence that `_places` belongs to
        self._places: set[int] = set()

    def beat(self) -> None:
        """A sign of life."""
        now, used = time.monotonic(), time.process_time()
        if not self.slot.slow:
            self.slot.gap = max(self.slot.gap, now - self.slot.beat)
            self.slot.used = max(self.slot.used, used - self._used)
        self.slot.beat, self._used = now, used

    def listen(self) -> None:
        """Answer the watching parent from now on; only in a main thread."""
        signal.signal(ASK, lambda number, frame: self.answer(frame))

    def answer(self, frame: FrameType | None) -> None:
        """Between two instructions of Python: say so, and whether this place is a new one."""
        if self._silence != self.slot.beat:
            self._silence = self.slot.beat
            self._places.clear()
        self.slot.where = f"{frame.f_code.co_filename}:{frame.f_lineno}".encode()[-NOTE + 1 :] if frame else b""
        places = []
        while frame is not None:
            places.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        place = hash(tuple(places))
        if place not in self._places:
            self._places.add(place)
            self.slot.fresh = time.monotonic()
        self.slot.answers += 1

    def stepped(self) -> None:
        """A step is done. The first two carry one-time work, so what counts as a long silence is learned from the third on."""
        self.slot.steps += 1
        if self.slot.steps <= 2:
            self.slot.gap = self.slot.used = 0.0
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


class _Silence(NamedTuple):
    """A rank's last sign of life, the CPU seconds used and the answers given by then, and when it last answered."""

    beat: float
    cpu: float
    answers: int
    answered: float


class Watcher:
    """Decides, from notes and process states, whether a rank is lost.

    Args:
        slots: Of all ranks.
        pids: Of all ranks.
        quiet: Seconds without a sign of life after which a stopped rank, or a rank that keeps the others waiting, is given up.
    """

    PATIENCE = 600.0  # seconds for work that cannot be told from progress: a first step, data, one long transfer
    FACTOR = 20.0  # a silence this many times longer than any before is no longer work
    LOOP = 5.0  # nor is this many times the CPU of any silence before, spent on places seen already
    LEAST = 0.5  # CPU seconds before a loop is called one
    SILENT = 1.0  # seconds before a rank is asked where it is
    LATE = 2.0  # seconds without an answer that mean there is none: a busy machine lets a rank wait for its turn

    def __init__(self, slots: ctypes.Array, pids: list[int], quiet: float) -> None:
        self.slots, self.pids, self.quiet = slots, pids, quiet
        self._since = [_Silence(-1.0, 0.0, 0, 0.0)] * len(pids)
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
        for rank in left:
            if self._since[rank].beat != self.slots[rank].beat:
                self._since[rank] = _Silence(self.slots[rank].beat, state(self.pids[rank])[1], self.slots[rank].answers, 0.0)
        silent = now - max((self.slots[r].beat for r in left), default=now)
        idle = [r for r in left if not self.slots[r].inside]  # finished ranks are not left
        if idle and silent > min(self.SILENT, self.quiet / 2):
            self._ask(min(idle, key=lambda r: self.slots[r].calls), now)
        if silent < self.quiet or not left:
            return None
        if idle:
            return self._silent(min(idle, key=lambda r: self.slots[r].calls), now)
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

    def _ask(self, rank: int, now: float) -> None:
        """Note the answers of a silent rank so far, and ask it once more."""
        before, answers = self._since[rank], self.slots[rank].answers
        if answers > before.answers:
            self._since[rank] = before._replace(answers=answers, answered=now)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], ASK)

    def _silent(self, rank: int, now: float) -> tuple[int, str] | None:
        """A rank outside every collective while nothing moves: it works, loops or sleeps."""
        slot, since = self.slots[rank], self._since[rank]
        (kind, cpu), silent = state(self.pids[rank]), now - slot.beat
        worked, known = cpu - since.cpu, slot.steps >= 3 and not slot.slow
        if silent < self.PATIENCE and not (
            known and (self._loops(slot, since, worked, now) or self._sleeps(kind, worked, silent))
        ):
            return None
        where = f" at {slot.where.decode(errors='replace')}" if since.answered else ""
        why = f"made no progress for {silent:.0f} s{where} {self.at(rank)} (process state {kind})"
        return rank, f"{why}; {self._others(rank)}"

    def _loops(self, slot: Slot, since: "_Silence", worked: float, now: float) -> bool:
        """Whether it runs Python, has been wherever it is before, and has used too much CPU for that."""
        circles = now - since.answered < self.LATE and now - slot.fresh > self.quiet / 2
        return circles and worked > max(min(self.LEAST, self.quiet), self.LOOP * max(s.used for s in self.slots))

    def _sleeps(self, kind: str, worked: float, silent: float) -> bool:
        """Whether it waits for something, and has for too long."""
        idle = kind != "R" and worked < silent / 4
        return idle and silent > max(self.quiet, self.FACTOR * max(s.gap for s in self.slots))

    def _overdue(self, left: list[int], now: float) -> tuple[int, str] | None:
        rank = left[0]
        if now - max(self.slots[r].beat for r in left) < self.PATIENCE:
            return None
        return rank, f"and all others wait in one collective for {self.PATIENCE:.0f} s: {self.at(rank)}"
