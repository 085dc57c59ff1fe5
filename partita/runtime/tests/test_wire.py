"""Counted bytes are those of gloo's model, op by op; what is not ours is not counted."""

import os
import socket
import statistics
from functools import partial

import pytest
import torch

from partita.cost.collective import backend_bytes
from partita.mesh import Mesh
from partita.runtime import wire
from partita.runtime.ranks import run_ranks
from partita.runtime.wire import Wire, inherited, sent

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = (1 << 20, 16 << 20)  # bytes of the large side

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="sockets tell their bytes on Linux only")  # noqa: PTH110


def call(net, op, whole, part):
    if op in ("all_reduce", "broadcast"):
        getattr(net, op)(whole, "dp")
    else:
        getattr(net, op)(part if op == "all_gather" else whole, "dp")


def counted(net):
    """{op: {size: bytes sent by this rank, the median of three}}."""
    found = {}
    for op in OPS:
        for size in SIZES:
            whole = torch.ones(size // 4)
            part = whole[: len(whole) // net.size("dp")].clone()
            call(net, op, whole, part)
            runs = []
            for _ in range(3):
                net.barrier()
                meter = Wire()
                meter.start()
                call(net, op, whole, part)
                meter.stop()
                runs.append(meter.total)
            found[f"{op} {size}"] = statistics.median(runs)
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("ranks", [2, 4])
def test_counted_bytes_are_the_backends(ranks):
    told = run_ranks(Mesh.of({"dp": ranks}), counted)
    for op in OPS:
        for size in SIZES:
            mean = statistics.mean(t[f"{op} {size}"] for t in told)
            model = backend_bytes("gloo", op, size, ranks)
            assert mean == pytest.approx(model, rel=0.01), f"{op} of {size} bytes on {ranks} ranks"


def pair():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    return server, client, server.accept()[0]


def test_what_is_written_counts_at_once_and_excluded_ports_do_not():
    server, client, other = pair()
    with server, client, other:
        port = frozenset({server.getsockname()[1]})
        before, without = sent(), sent(port)
        client.setblocking(False)
        written = sum(client.send(b"x" * 100_000) for _ in range(3))  # nobody reads: much of it waits in the socket
        assert sent() - before == written
        assert sent(port) == without


def bytes_of_parents_sockets(net, client):
    client.sendall(b"x" * 1000)
    return [len(inherited()) > 0, sent(), sent(foreign=inherited())]


@pytest.mark.gloo
def test_the_parents_sockets_are_not_the_ranks():
    server, client, other = pair()
    with server, client, other:
        ((shared, everything, own),) = run_ranks(Mesh(), partial(bytes_of_parents_sockets, client=client))
    assert shared
    assert everything >= 1000
    assert own == 0


def test_where_nothing_can_be_counted_a_reason_is_given(monkeypatch):
    meter = Wire(readable=False)
    meter.start()
    meter.stop()
    assert (meter.readable, meter.total) == (False, 0)
    assert "NCCL" in meter.reason
    monkeypatch.setattr(wire.sys, "platform", "darwin")
    assert sent() is None
    assert "Linux" in Wire().reason
