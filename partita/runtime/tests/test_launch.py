"""Ranks start, answer, and are named when they die."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from partita.errors import Fault, RankLost, Refused, RunFailed
from partita.mesh import Mesh
from partita.runtime.launch import cache_folder, ranks_from_environment
from partita.runtime.ranks import run_ranks

pytestmark = pytest.mark.gloo
FOUR = Mesh.of({"dp": 4})
ENOUGH = 60.0  # seconds for what takes two or three: a busy machine needs them to start four ranks


def children() -> list[int]:
    return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_every_rank_answers_in_order_and_axes_do_not_mix():
    def work(net):
        a, b = torch.full((3,), float(net.rank)), torch.full((2,), float(net.rank))
        net.all_reduce(a, "dp")
        net.all_reduce(b, "tp")
        return [net.rank, net.coordinate, a[0].item(), b[0].item(), [e.json() for e in net.ledger]]

    found = run_ranks(Mesh.of({"dp": 2, "tp": 2}), work)
    assert [r[0] for r in found] == [0, 1, 2, 3]
    assert [r[1] for r in found] == [{"dp": d, "tp": t} for d in (0, 1) for t in (0, 1)]
    assert [r[2] for r in found] == [2.0, 4.0, 2.0, 4.0]
    assert [r[3] for r in found] == [1.0, 1.0, 5.0, 5.0]
    assert all(r[4] == [["all_reduce", "dp", 12, "float32", ""], ["all_reduce", "tp", 8, "float32", ""]] for r in found)
    assert not children()


def test_ranks_are_direct_children_and_the_only_ones():
    seen: list[list[int]] = []

    def look(done: int, loss: float) -> None:
        seen.append(children())

    def work(net):
        net.control.done = 1
        time.sleep(0.6)
        return os.getpid()

    pids = run_ranks(Mesh.of({"dp": 2}), work, progress=look)
    assert seen
    assert sorted(seen[0]) == sorted(pids)


def test_ranks_run_after_the_caller_has_trained():
    a = torch.randn(500, 500, requires_grad=True)
    for _ in range(3):
        (a @ a).relu().sum().backward()

    def work(net):
        b = torch.ones(500, 500, requires_grad=True)
        (b @ b).relu().sum().backward()
        return [float(b.grad.sum()), torch.get_num_threads()]

    assert run_ranks(Mesh.of({"dp": 2}), work) == [[2 * 500.0**3, 1]] * 2


def test_one_rank_needs_no_axis():
    assert run_ranks(Mesh(), lambda net: [net.rank, net.ranks, net.gather(5), net.share("x")]) == [[0, 1, [5], "x"]]


def test_ranks_listen_on_the_loopback_only():
    def work(net):
        net.all_reduce(torch.ones(2), "dp")
        mine = {fd.readlink().name for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]  # 0A: listening

    for addresses in run_ranks(Mesh.of({"dp": 2}), work):
        assert addresses
        assert all(a.split(":")[0] == "0100007F" for a in addresses), addresses


def raises():
    raise ValueError("bad batch")


def loops():
    while True:
        pass


LOSSES = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "raise": raises,
    "loop": loops,
}


def loses(how):
    def work(net):
        x = torch.ones(1000)
        for i in range(40):
            net.notes.stepped()
            if net.rank == 2 and i == 20:
                if how == "skip":
                    continue
                LOSSES[how]()
            net.all_reduce(x, "dp", label="x")
        return 1

    return work


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("kill", RankLost, "was killed by SIGKILL"),
        ("exit", RankLost, "left with exit code 3"),
        ("raise", RunFailed, "ValueError: bad batch"),
        ("stop", RankLost, "is stopped"),
        ("skip", RankLost, "keeps the others waiting"),
    ],
)
def test_a_lost_rank_is_named_and_the_others_end(how, kind, words):
    began = time.monotonic()
    with pytest.raises(kind, match=words) as caught:
        run_ranks(FOUR, loses(how), quiet=1.5)
    assert "rank 2" in str(caught.value)
    assert "all_reduce on dp of 4000 bytes float32 for x (call 20)" in str(caught.value) or how == "skip"
    assert time.monotonic() - began < ENOUGH
    assert not children()


@pytest.mark.slow
def test_a_looping_rank_is_named():
    with pytest.raises(
        RankLost, match=r"rank 2 of 4 made no progress for \d+ s at \S*test_launch\.py:\d+ after all_reduce on dp"
    ):
        run_ranks(FOUR, loses("loop"), quiet=2)


@pytest.mark.slow
def test_a_rank_in_one_long_op_is_not_given_up():
    """The others wait for it for many times as long as for anything before; nothing says that it is not at work."""

    def work(net):
        x, large = torch.ones(10), torch.ones(3000, 3000)
        for i in range(8):
            net.notes.stepped()
            if net.rank == 1 and i == 6:
                torch.linalg.svdvals(large[:1500, :1500] + torch.eye(1500))
            net.all_reduce(x, "dp", label="x")
        return 1

    assert run_ranks(Mesh.of({"dp": 2}), work, quiet=0.2) == [1, 1]


def test_a_size_mismatch_names_the_odd_rank(capfd):
    def work(net):
        net.all_reduce(torch.ones(999 if net.rank == 1 else 1000), "dp")
        return net.share(0)

    with pytest.raises((RankLost, RunFailed)) as caught:
        run_ranks(Mesh.of({"dp": 2}), work)
    assert "bytes float32" in str(caught.value)
    capfd.readouterr()


def test_a_refusal_in_a_rank_is_the_refusal_of_the_run():
    def work(net):
        raise Refused(Fault("P112", "no good", have=f"rank {net.rank}", at="x.y"))

    with pytest.raises(Refused) as caught:
        run_ranks(Mesh.of({"dp": 2}), work)
    assert caught.value.faults[0].code == "P112"
    assert caught.value.faults[0].at == "x.y"


def test_a_failure_tells_where_in_the_users_code(tmp_path):
    def work(net):
        return {"x": object()}

    with pytest.raises(RunFailed, match="not JSON serializable"):
        run_ranks(Mesh.of({"dp": 1}), work)


def test_results_hold_numbers_json_does_not_know():
    assert run_ranks(Mesh(), lambda net: [float("inf"), None])[0] == [float("inf"), None]


STORY = """
import os, sys, time
from partita.mesh import Mesh
from partita.runtime.ranks import run_ranks

def work(net):
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.05)
        net.notes.beat()

run_ranks(Mesh.of({"dp": 2}), work)
"""


def gone(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_never_outlive_the_parent(number):
    parent = subprocess.Popen([sys.executable, "-c", STORY], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(number)
    parent.wait(10)
    parent.stdout.close()
    end = time.monotonic() + 5
    while not all(map(gone, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(map(gone, pids))


def test_ranks_run_from_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(run_ranks(Mesh.of({"dp": 2}), lambda net: net.gather(net.rank))))
    thread.start()
    thread.join(30)
    assert found == [[[0, 1], [0, 1]]]


def test_torchrun_is_known_by_all_its_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_from_environment() is None
    monkeypatch.setenv("RANK", "3")
    assert ranks_from_environment() is None
    for name, value in {"WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    launched = ranks_from_environment()
    assert launched is not None
    assert (launched.rank, launched.ranks, launched.local_rank, launched.port) == (3, 8, 1, 29500)


def test_the_cache_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "partita"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "partita"


@pytest.mark.slow
def test_a_deadlock_names_the_rank_with_the_fewest_calls():
    def work(net):
        if net.coordinate == {"dp": 0, "tp": 0}:
            net.all_reduce(torch.ones(2), "dp", label="wrong way")
        net.all_reduce(torch.ones(2), "tp", label="x")
        net.all_reduce(torch.ones(2), "dp", label="y")

    began = time.monotonic()
    with pytest.raises((RankLost, RunFailed)) as caught:
        run_ranks(Mesh.of({"dp": 2, "tp": 2}), work, quiet=2)
    assert "rank" in str(caught.value)
    assert time.monotonic() - began < ENOUGH
