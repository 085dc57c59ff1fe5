"""A switch over real sockets: sums are right whatever the link does, bytes are counted, strangers and the dead are noticed."""

import multiprocessing as mp
import socket
import threading

import numpy as np
import pytest

from partita.cluster import Testbed
from partita.errors import RunFailed
from partita.program.switched import packets_of
from partita.runtime.switch import Address, Client, Faults, opened
from partita.runtime.switch.blocks import NotFinite
from partita.runtime.switch.loading import NoPlane, compiled
from partita.runtime.switch.packets import HEADER, Line, size_of, to_bytes
from partita.runtime.switch.protocol import DATA, POOL, SMALL, Packet
from partita.runtime.testbed import Network
from partita.runtime.testbed.hosts import missing

BAD = [Faults(loss, 0.05, 0.05, seed=7) for loss in (0.0, 0.1, 0.2, 0.3)]


def no_kernel():
    """Why XDP cannot be tried here."""
    try:
        return missing() or (compiled() and None)
    except NoPlane as why:
        return str(why)


def work(client, rounds=3, count=300):
    """Small sums and float sums of one worker; whether they were right, and bytes each way."""
    me, n, right = client.worker, client.workers, True
    for end in client.ends.values():
        end.timer.most = max(4 * end.timer.least, 0.02)  # nobody computes here, so nobody is late
    for r in range(rounds):
        got = client.all_reduce_small(np.arange(20, dtype=np.int32) * (me + 1) + r)
        right &= bool((got == sum(np.arange(20) * (w + 1) + r for w in range(n))).all())
    for dtype, bound in ((np.float32, 1e-6), (np.float64, 1e-13)):
        vectors = [np.random.default_rng(w).normal(size=count).astype(dtype) for w in range(n)]
        got = client.all_reduce(vectors[me])
        right &= got.dtype == dtype and bool(np.abs(got - np.sum(vectors, axis=0, dtype=np.float64)).max() < bound)
    client.close()
    return right, client.sent, client.received


def threads(calls):
    """What each call returns, all at the same time."""
    out = [None] * len(calls)

    def run(i):
        try:
            out[i] = calls[i]()
        except Exception as error:
            out[i] = error

    all_threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in all_threads:
        t.start()
    for t in all_threads:
        t.join()
    return out


@pytest.mark.parametrize("faults", BAD, ids=lambda f: f"{f.loss:.0%}")
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_sums_over_udp_are_right_whatever_the_link_does(workers, faults):
    with opened("udp", None, workers) as switch:
        clients = [Client(switch.address, 0, w, workers, faults=faults, least=0.005) for w in range(workers)]
        told = threads([lambda c=c: work(c) for c in clients])
        assert [t[0] for t in told] == [True] * workers, told
        assert switch.counts["sums"] == 3 * 3 + packets_of(300, 4) + packets_of(300, 8)


def test_bytes_are_those_of_the_formula():
    with opened("udp", None, 2) as switch:
        clients = [Client(switch.address, 0, w, 2, least=5.0) for w in range(2)]
        told = threads([lambda c=c: work(c) for c in clients])
    small = 3 * 2 * 3 * 64  # 20 values a time: three packets, DATA and ACK; and as many back
    pool = (packets_of(300, 4) + packets_of(300, 8)) * size_of(POOL)
    assert (size_of(SMALL), size_of(POOL)) == (64, 1056)
    for right, sent, received in told:
        assert right
        assert sent == small + pool
        assert small - 3 * 64 + pool <= received <= small + pool  # the last FREE may still be on its way


def test_a_large_tensor_goes_slab_by_slab():
    count = 65536 + 300
    vectors = [np.random.default_rng(w).normal(size=count).astype(np.float32) for w in range(2)]
    with opened("udp", None, 2) as switch:
        clients = [Client(switch.address, 0, w, 2, least=5.0) for w in range(2)]
        told = threads([lambda c=c: c.all_reduce(vectors[c.worker]) for c in clients])
        for got, client in zip(told, clients, strict=True):
            np.testing.assert_allclose(got, vectors[0] + vectors[1], atol=1e-6)
            assert client.sent == packets_of(count, 4) * size_of(POOL)
            client.close()
    bad = Client(Address("127.0.0.1", 1, 0), 0, 0, 1)
    with pytest.raises(NotFinite, match="value 2 is nan"):
        bad.all_reduce(np.array([0.0, 1.0, np.nan]))
    bad.close()


def test_groups_of_one_switch_do_not_mix():
    with opened("udp", None, 2, jobs=3) as switch:
        clients = [Client(switch.address, job, w, 2) for job in range(3) for w in range(2)]
        told = threads([lambda c=c: c.all_reduce_small(np.full(3, 10**c.line.job, np.int32)) for c in clients])
        assert [int(t[0]) for t in told] == [2, 2, 20, 20, 200, 200]
        for client in clients:
            client.close()


def test_strangers_are_dropped_and_counted():
    with opened("udp", None, 1) as switch, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        at, values = (switch.address.host, switch.address.port), np.ones(8, np.int32)
        good = to_bytes(Packet(DATA, 0, 0, values), SMALL, Line(switch.address.cookie, 0))
        for bad in (
            b"", b"hello", good[:-1], good + b"x", HEADER.pack(*HEADER.unpack_from(b"\xff" * 32)) + good[32:],
            to_bytes(Packet(DATA, 0, 0, values), SMALL, Line(switch.address.cookie ^ 1, 0)),
            to_bytes(Packet(DATA, 0, 0, values), SMALL, Line(switch.address.cookie, 1)),
            to_bytes(Packet(DATA, 0, 9, values), SMALL, Line(switch.address.cookie, 0)),
        ):  # fmt: skip
            stranger.sendto(bad, at)
        client = Client(switch.address, 0, 0, 1)
        stranger.sendto(b"not a sum", client._socket.getsockname())
        assert client.all_reduce_small(np.arange(3, dtype=np.int32)).tolist() == [0, 1, 2]
        assert switch.counts["strangers"] == 8
        assert client.strangers == 1
        client.close()


def test_a_stuck_worker_is_named():
    with opened("udp", None, 3) as switch:
        clients = [Client(switch.address, 0, w, 3, patience=0.3, least=0.01) for w in (0, 2)]
        told = threads([lambda c=c: c.all_reduce_small(np.ones(1, np.int32)) for c in clients])
        for error, client in zip(told, clients, strict=True):
            assert isinstance(error, RunFailed)
            assert "for worker 1 of 3" in str(error)
            client.close()


def test_a_switch_that_was_started_anew_ends_the_run():
    with opened("udp", None, 1) as switch:
        address = switch.address
        client = Client(address, 0, 0, 1, least=0.001)
        assert client.all_reduce_small(np.ones(1, np.int32)).tolist() == [1]
    client.ends[SMALL].timer.most = 0.004
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind((address.host, address.port))
    with bound, pytest.raises(RunFailed, match="did not answer worker 0 in 31 attempts"):
        client.all_reduce_small(np.ones(1, np.int32))
    client.close()


def test_what_is_not_finite_is_named():
    client = Client(Address("127.0.0.1", 1, 0), 0, 0, 1)
    with pytest.raises(NotFinite, match="value 1 is inf"):
        client.all_reduce(np.array([1.0, np.inf]))
    client.close()


def test_without_a_testbed_udp_is_used_and_the_reason_said():
    with opened("xdp", None, 2) as switch:
        assert switch.plane == "udp"
        assert switch.note == "reduced over UDP: XDP cannot be had here: it needs the ports of a testbed's switch"


def test_without_a_compiler_udp_is_used_and_the_reason_said(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(NoPlane, match="clang"):
        compiled(tmp_path)


@pytest.mark.skipif(no_kernel() is not None, reason=f"no XDP here: {no_kernel()}")
@pytest.mark.parametrize(("workers", "hosts"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize(
    "faults", [BAD[0], pytest.param(BAD[1], marks=pytest.mark.slow), pytest.param(BAD[3], marks=pytest.mark.slow)]
)
def test_sums_in_the_kernel_are_right_whatever_the_link_does(workers, hosts, faults):
    bed = Testbed.of(hosts=hosts)
    network = Network(bed)
    with opened("xdp", network, workers) as switch:
        assert switch.plane == "xdp", switch.note
        context = mp.get_context("fork")
        mine, theirs = context.Pipe(duplex=False)

        def child(w):
            network.enter(w, workers)
            theirs.send([w, *work(Client(switch.address, 0, w, workers, faults=faults, least=0.005))])

        children = [context.Process(target=child, args=(w,)) for w in range(workers)]
        for one in children:
            one.start()
        told = sorted(mine.recv() for _ in children if mine.poll(30))
        for one in children:
            one.join()
        assert [t[:2] for t in told] == [[w, True] for w in range(workers)]
        assert switch.counts["sums"] == 3 * 3 + packets_of(300, 4) + packets_of(300, 8)
    network.close()
    mine.close(), theirs.close()
