"""Whose fault it is when nothing moves: the rule on a clock of its own, however busy this machine is."""

import signal
from types import SimpleNamespace

import pytest

from partita.runtime import watch
from partita.runtime.watch import ASK, Board, Notes, Watcher

LOOK = 0.25  # seconds between two looks of the parent
QUIET = 5.0
PLENTY = 10**6


class World:
    """Two ranks: rank 0 waits in a collective, rank 1 does what a test says.

    Args:
        share: Of a core that rank 1 gets.
        kind: Its process state.
        answer: answer(question number) -> the place it answers from; None: it does not answer.
        gap, used: Longest silence before, and most CPU seconds of one.
        steps, slow: Whether its silences are known.
    """

    def __init__(self, monkeypatch, *, share=1.0, kind="R", answer=None, gap=0.05, used=0.02, steps=10, slow=0):
        self.now, self.share, self.kind, self.answer, self.asked, self.late = 100.0, share, kind, answer, 0, 1 / share / 10
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(watch, "state", lambda pid: (self.kind, self.cpu) if pid == 11 else ("S", 3.0))
        monkeypatch.setattr(watch.os, "kill", self.kill)
        self.cpu, self.places, self.due = 7.0, set(), []
        self.board = Board(2)
        self.watcher = Watcher(self.board.slots, [10, 11], QUIET)
        for rank, slot in enumerate(self.board.slots):
            slot.calls, slot.inside, slot.steps, slot.what = 21 - rank, 1 - rank, steps, b"all_reduce for x"
            slot.gap, slot.used, slot.slow = gap, used, slow
        self.watcher.lost([0, 1])

    def kill(self, pid, number):
        assert (pid, number) == (11, ASK)
        self.asked += 1
        if self.answer is not None and (place := self.answer(self.asked)) is not None:
            self.due.append((self.now + self.late, place))

    def pass_(self):
        self.now += LOOK
        self.cpu += self.share * LOOK
        slot = self.board.slots[1]
        for when, place in [d for d in self.due if d[0] <= self.now]:
            slot.answers += 1
            if place not in self.places:
                self.places.add(place)
                slot.fresh = when
        self.due = [d for d in self.due if d[0] > self.now]

    def named(self, within):
        """(seconds until rank 1 was named, what was said), or (None, "")."""
        began = self.now
        while self.now - began < within:
            self.pass_()
            if found := self.watcher.lost([0, 1]):
                assert found[0] == 1
                return self.now - began, found[1]
        return None, ""


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2, 0.1])
def test_an_endless_loop_is_named_in_ten_seconds_on_a_busy_machine(monkeypatch, share):
    seconds, said = World(monkeypatch, share=share, answer=lambda n: n % 3).named(60)
    assert seconds is not None
    assert QUIET <= seconds <= 10
    assert "made no progress" in said


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_one_long_op_is_work(monkeypatch, share):
    assert World(monkeypatch, share=share).named(Watcher.PATIENCE - 10) == (None, "")


def test_python_and_then_one_long_op_is_work(monkeypatch):
    assert World(monkeypatch, answer=lambda n: n % 3 if n < 6 else None).named(120) == (None, "")


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_rank_that_gets_to_new_places_is_slow_and_not_lost(monkeypatch, share):
    assert World(monkeypatch, share=share, answer=lambda n: n // 4).named(120) == (None, "")


def test_a_rank_that_gets_no_turn_is_not_lost(monkeypatch):
    assert World(monkeypatch, share=1e-6, answer=lambda n: 0).named(120) == (None, "")


def test_places_known_are_work_as_long_as_the_cpu_is_what_it_was_before(monkeypatch):
    """A model whose blocks run the same lines: 3 CPU seconds in silence are usual, so 15 are too many."""
    seconds, _ = World(monkeypatch, answer=lambda n: n % 5, used=3.0).named(60)
    assert seconds == pytest.approx(3.0 * Watcher.LOOP, abs=2 * LOOK)
    assert World(monkeypatch, answer=lambda n: n % 5, used=3.0, share=0.1).named(100) == (None, "")


def test_sleep_is_given_up_after_a_silence_far_longer_than_any_before(monkeypatch):
    for gap, seconds in ((0.05, QUIET), (0.5, 10.0)):
        assert World(monkeypatch, kind="S", share=1e-6, gap=gap).named(60)[0] == pytest.approx(seconds, abs=2 * LOOK)


@pytest.mark.parametrize("more", [{"slow": 1}, {"steps": 2}])
def test_what_may_take_its_time_is_given_time(monkeypatch, more):
    seconds, _ = World(monkeypatch, answer=lambda n: 0, **more).named(PLENTY)
    assert seconds == pytest.approx(Watcher.PATIENCE, abs=2 * LOOK)


def test_a_stopped_rank_is_named_by_its_state(monkeypatch):
    seconds, said = World(monkeypatch, kind="T", share=1e-6).named(60)
    assert seconds == pytest.approx(QUIET, abs=2 * LOOK)
    assert "is stopped" in said


def test_a_rank_tells_new_places_from_known_ones():
    """A real frame: the same line again is known, another one new, and a sign of life forgets them all."""
    slot = Board(1).slots[0]
    notes = Notes(slot)

    def frame(*numbers):
        code = frame.__code__
        return SimpleNamespace(f_code=code, f_lasti=numbers[0], f_lineno=7, f_back=frame(*numbers[1:]) if numbers[1:] else None)

    def fresh(*numbers):
        slot.fresh = 0.0
        notes.answer(frame(*numbers))
        return slot.fresh > 0

    assert [fresh(1, 5), fresh(1, 5), fresh(2, 5), fresh(1, 6), fresh(2, 5)] == [True, False, True, True, False]
    notes.beat()
    assert fresh(1, 5)
    assert slot.answers == 6
    assert slot.where.decode().endswith("test_watch.py:7")


def test_whoever_does_not_listen_is_not_disturbed():
    assert signal.getsignal(ASK) == signal.SIG_DFL  # which ignores this one
    signal.raise_signal(ASK)
