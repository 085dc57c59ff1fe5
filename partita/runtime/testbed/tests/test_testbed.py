"""Hosts of a testbed: ranks live on them, links keep their rate and delay, counters confirm the ledger, nothing is left."""

import multiprocessing as mp
import os
import time
from pathlib import Path

import pytest
import torch

from partita.cluster import Testbed
from partita.errors import Refused
from partita.mesh import Mesh
from partita.runtime import testbed
from partita.runtime.ranks import run_ranks
from partita.runtime.testbed import hosts
from partita.runtime.testbed.counters import carried
from partita.runtime.testbed.hosts import INTERFACE, missing
from partita.runtime.watch import state

OWN = Path("/proc/self/ns/net")
rooted = pytest.mark.skipif(missing() is not None, reason=f"no testbed here: {missing()}")


def namespaces():
    """Network namespaces that processes of this machine are in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(str(entry.readlink()))
        except OSError:
            continue
    return found


def links():
    return {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def settled_count(before):
    """What the interface has sent since, once nothing more waits in its queue."""
    last = carried(INTERFACE)
    while True:
        time.sleep(0.05)
        now = carried(INTERFACE)
        if now == last:
            return now - before
        last = now


def sends(net):
    """[payload an all_reduce of 1 MiB put on this host's link, seconds of it, who lives here]."""
    x = torch.ones(1 << 18)
    net.all_reduce(x, "dp")
    net.barrier()
    before, start = settled_count(carried(INTERFACE)) and carried(INTERFACE), time.perf_counter()
    net.all_reduce(x, "dp")
    seconds = time.perf_counter() - start
    return [settled_count(before).payload, seconds, str(OWN.readlink())]


@rooted
@pytest.mark.gloo
def test_links_keep_their_rate_and_counters_confirm_the_ledger():
    told = run_ranks(Mesh.of({"dp": 2}), sends, cluster=Testbed.of(hosts=2, rate="100 Mbit/s"))
    for payload, seconds, _ in told:
        assert payload == pytest.approx(1 << 20, rel=0.01)  # of an all_reduce on two ranks each sends what it is of
        assert seconds > 0.9 * ((1 << 20) - 2 * 50_000) / 12.5e6  # less what the limit lets pass at once


@rooted
@pytest.mark.gloo
def test_ranks_are_spread_over_hosts_in_order():
    told = run_ranks(Mesh.of({"dp": 4}), lambda net: str(OWN.readlink()), cluster=Testbed.of(hosts=2))
    assert told[0] == told[1] != told[2] == told[3]
    assert str(OWN.readlink()) not in told
    assert [Testbed(hosts=2).host(rank, 3) for rank in range(3)] == [0, 0, 1]
    assert [Testbed(hosts=4).host(rank, 2) for rank in range(2)] == [0, 1]


@rooted
@pytest.mark.gloo
def test_frames_take_as_long_as_was_asked():
    def work(net):
        x, times = torch.ones(1), []
        for _ in range(5):
            start = time.perf_counter()
            net.all_reduce(x, "dp")
            times.append(time.perf_counter() - start)
        return sorted(times)[2]

    told = run_ranks(Mesh.of({"dp": 2}), work, cluster=Testbed.of(hosts=2, delay="5 ms"))
    assert 0.01 < told[0] < 0.1  # there and back at least


@rooted
def test_nothing_is_left_after_a_run():
    before = namespaces(), links(), threads()
    run_ranks(Mesh.of({"dp": 2}), lambda net: 0, cluster=Testbed.of(hosts=3, delay="1 ms"))
    assert (links(), threads()) == before[1:]
    assert namespaces() <= before[0]


def threads():
    return len(list(Path("/proc/self/task").iterdir()))


def command(bed, told):
    """What a command does: ranks that take their time, of which the first tells its pid and where it lives."""

    def work(net):
        if net.rank == 0:
            told.send([os.getpid(), str(OWN.readlink())])
        time.sleep(60)

    run_ranks(Mesh.of({"dp": 2}), work, cluster=bed)


@rooted
@pytest.mark.parametrize("more", [{}, {"delay": "1 ms"}])
def test_nothing_is_left_after_a_kill(more):
    before = links()
    mine, theirs = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=command, args=(Testbed.of(hosts=2, **more), theirs))
    process.start()
    pid, where = mine.recv()
    assert where in namespaces()
    process.kill()
    process.join()
    deadline = time.monotonic() + 10
    while (where in namespaces() or state(pid)[0] not in "XZ") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert where not in namespaces()  # the ranks went with the command, and the namespaces with the ranks
    assert state(pid)[0] in "XZ"
    assert links() == before
    mine.close(), theirs.close()


def test_without_root_it_is_refused_in_five_slots(monkeypatch):
    monkeypatch.setattr(hosts, "capable", lambda: False)
    with pytest.raises(Refused, match=r"NotSupported \[P115\] no testbed of 4 hosts at 100 Mbit/s here") as refused:
        run_ranks(Mesh.of({"dp": 2}), lambda net: 0, cluster=Testbed.of(hosts=4, rate="100 Mbit/s"))
    (fault,) = refused.value.faults
    assert "not root" in fault.have
    assert 'fallback = "loopback"' in fault.cure


@pytest.mark.gloo
def test_the_fallback_runs_on_the_loopback_and_says_so(monkeypatch):
    monkeypatch.setattr(hosts, "capable", lambda: False)
    bed = Testbed.of(hosts=4, fallback="loopback")
    assert run_ranks(Mesh.of({"dp": 2}), lambda net: net.rank, cluster=bed) == [0, 1]
    assert "all ranks were on the loopback" in testbed.note(bed)
    assert testbed.note("here") is None


def test_ranks_of_torchrun_are_refused(monkeypatch):
    monkeypatch.setattr(hosts, "ranks_from_environment", lambda: object())
    (fault,) = testbed.faults(Testbed())
    assert "torchrun" in fault.what
    assert testbed.faults("here") == []
