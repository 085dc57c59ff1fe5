"""Every sum exactly once, whatever links lose, double and overtake: random schedules in a simulator, with fixed seeds."""

import heapq
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partita.runtime.switch.protocol import ACK, DATA, MAX, POOL, SMALL, SUM, Form, Slots, Stuck, Timer, Worker, distance

FEW = Form(lanes=2, slots=4, window=4, acknowledged=True)
FEW_POOL = Form(lanes=2, slots=8, window=4, acknowledged=False)


class Links:
    """Workers, a switch and links between them, in simulated time; one that is `dead` never sends."""

    def __init__(self, form, workers, sums, *, seed, loss=0.0, copies=0.0, delay=(1, 30), first=0, dead=(), kind=None, **more):
        self.random, self.loss, self.copies, self.delay = random.Random(seed), loss, copies, delay
        self.switch = Slots(form, workers, first)
        more = {"patience": 1e9, "attempts": 1000, **more}
        self.workers = [
            Worker(form, w, workers, first=first, timer=Timer(least=70.0, most=500.0), **more) for w in range(workers)
        ]
        self.kind = kind if kind is not None else DATA if form.acknowledged else SUM
        self.values = [[np.array([(w + 1) * 1000 + k, w - k], np.int32) for k in range(sums)] for w in range(workers)]
        self.dead = dead
        self.time, self.order, self.events = 0.0, 0, []
        self.got = [[] for _ in range(workers)]

    def send(self, *what):
        for _ in range(1 + (self.random.random() < self.copies)):
            if self.random.random() >= self.loss:
                self.push(self.time + self.random.uniform(*self.delay), *what)

    def push(self, time, *what):
        self.order += 1
        heapq.heappush(self.events, (time, self.order, what))

    def pump(self, w):
        for packet in self.workers[w].sends(self.time):
            if w not in self.dead:
                self.send("up", packet)
        if self.workers[w].sent:
            self.push(max(self.workers[w].due_first, self.time + 1), "timer", w)

    def run(self, limit=200_000):
        numbers = [worker.hand_over(rows, self.kind) for worker, rows in zip(self.workers, self.values, strict=True)]
        for w in range(len(self.workers)):
            self.pump(w)
        while self.events and limit:
            limit -= 1
            self.time, _, (what, *rest) = heapq.heappop(self.events)
            if what == "up":
                answer = self.switch.receive(rest[0])
                for w in range(len(self.workers)) if answer and answer.asker is None else [answer.asker] if answer else []:
                    self.send("down", w, answer.packet._replace(values=copied(answer.packet.values)))
                continue
            w = rest[0]
            if what == "down":
                before = set(self.workers[w].sums)
                ack = self.workers[w].receive(rest[1], self.time)
                self.got[w] += sorted(set(self.workers[w].sums) - before)
                if ack:
                    self.send("up", ack)
            self.pump(w)
        return [worker.take(n) for worker, n in zip(self.workers, numbers, strict=True)]

    def truth(self):
        fold = np.maximum.reduce if self.kind == MAX else np.add.reduce
        return [fold([rows[k] for rows in self.values]) for k in range(len(self.values[0]))]

    def check(self):
        told = self.run()
        for w, sums in enumerate(told):
            assert sums is not None, f"worker {w} has {len(self.workers[w].sums)} sums of {len(self.truth())}"
            np.testing.assert_array_equal(sums, self.truth())
            assert len(self.got[w]) == len(set(self.got[w])) == len(sums)  # each handed on once


def copied(values):
    return None if values is None else values.copy()


@pytest.mark.law
@pytest.mark.parametrize("form", [FEW, FEW_POOL], ids=["small", "pool"])
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_sum_comes_exactly_once(form, loss, workers):
    for seed in range(4):
        Links(form, workers, 40, seed=seed, loss=loss, copies=0.1).check()


@pytest.mark.law
@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from([FEW, FEW_POOL]),
    seed=st.integers(0, 2**32),
    workers=st.integers(1, 5),
    sums=st.integers(1, 20),
    loss=st.floats(0, 0.4),
    copies=st.floats(0, 0.5),
    spread=st.floats(1, 200),
    first=st.sampled_from([0, 2**32 - 8, 2**31 - 8]),
)
def test_random_schedules_deliver_every_sum(form, seed, workers, sums, loss, copies, spread, first):
    Links(form, workers, sums, seed=seed, loss=loss, copies=copies, delay=(1, 1 + spread), first=first).check()


@pytest.mark.slow
@pytest.mark.law
@pytest.mark.parametrize("form", [FEW, FEW_POOL], ids=["small", "pool"])
def test_a_thousand_schedules_deliver_every_sum(form):
    for seed in range(1000):
        Links(form, 4, 24, seed=seed, loss=(0.0, 0.1, 0.3)[seed % 3], copies=0.1).check()


def test_a_maximum_is_one_too():
    Links(FEW_POOL, 3, 20, seed=1, loss=0.2, copies=0.1, kind=MAX).check()


def test_messages_stay_few():
    """4 a worker and sum in the small form without loss, 2 in the pool form; half as many again at 10 % loss."""
    for form, ideal in ((FEW, 4), (FEW_POOL, 2)):
        for loss, most in ((0.0, 1.05), (0.1, 1.75)):
            links = Links(form, 4, 60, seed=5, loss=loss)
            links.check()
            sent = sum(worker.counts["packets"] for worker in links.workers)
            assert sent / 60 / 4 <= most * ideal / 2, (form, loss)


def test_numbers_wrap_around():
    assert distance(2, 0xFFFFFFFF) == 3
    assert distance(0xFFFFFFFF, 2) == -3
    for form in (FEW, FEW_POOL):
        Links(form, 3, 30, seed=2, loss=0.1, first=2**32 - 16).check()


def test_a_worker_that_never_sends_is_named():
    links = Links(FEW, 4, 2, seed=3, dead={2}, patience=5_000.0)
    with pytest.raises(Stuck) as stuck:
        links.run()
    assert stuck.value.missing == (2,)


def test_a_switch_that_is_gone_is_noticed():
    links = Links(FEW, 2, 2, seed=3, loss=1.0, attempts=6)
    with pytest.raises(Stuck) as stuck:
        links.run()
    assert stuck.value.missing == ()
    assert stuck.value.attempts == 7


def test_a_copy_is_answered_to_its_sender_alone():
    switch = Slots(SMALL, 2)
    worker = [Worker(SMALL, w, 2) for w in range(2)]
    first, second = (w.hand_over([np.ones(8, np.int32)], DATA) and next(w.sends(0.0)) for w in worker)
    assert switch.receive(first) is None
    assert switch.receive(first).asker == 0  # WAIT: the other has not been heard
    assert switch.receive(second).asker is None
    assert switch.receive(second).asker == 1
    late = first._replace(kind=ACK, values=None)
    assert [switch.receive(late), switch.receive(late._replace(worker=1)).asker] == [None, None]
    assert switch.receive(late).asker == 0  # that round is over: FREE once more
    assert switch.receive(first) is None  # an old packet touches nothing
    assert switch.counts == {"copies": 2, "sums": 1, "late": 1, "stale": 1}


def test_the_timer_stays_above_the_round_trips():
    timer = Timer(least=0.0, most=10.0)
    for _ in range(50):
        timer.saw(1.0)
        timer.saw(1.2)
    assert 1.2 < timer.wait(0) < 1.8
    assert timer.wait(1) == 2 * timer.wait(0)
    assert timer.wait(20) == 10.0


def test_forms_have_room_for_what_their_proof_needs():
    for form in (SMALL, POOL, FEW, FEW_POOL):
        assert form.slots & (form.slots - 1) == 0
        assert form.window <= (form.slots if form.acknowledged else form.slots // 2)
