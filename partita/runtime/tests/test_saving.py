"""Training goes on while a checkpoint is written; what is written is what was there when it began."""

import os
import time
from pathlib import Path

import pytest
import torch

from partita.errors import RunFailed
from partita.mesh import Mesh
from partita.runtime import saving
from partita.runtime.checkpoint import Saver, check, read_whole, steps
from partita.runtime.net import Net
from partita.runtime.ranks import run_ranks

pytestmark = pytest.mark.gloo
SLOW = 0.4  # seconds a file takes here


@pytest.fixture
def slowly(monkeypatch):
    plain = saving.write

    def write(*args):
        time.sleep(SLOW)
        return plain(*args)

    monkeypatch.setattr(saving, "write", write)


def test_training_goes_on_and_what_was_there_is_written(slowly, split, gpt, tmp_path):
    whole = split(gpt, {"dp": 2}, 4, folder=tmp_path / "whole")
    got = split(gpt, {"dp": 2}, 9, folder=tmp_path / "run", save_every=4)
    first, second, last = got.ranks[0]["checkpoints"]
    assert [c["step"] for c in (first, second, last)] == [4, 8, 9]
    assert all(c["seconds"] >= SLOW for c in (first, second, last))
    assert first["waited_seconds"] < SLOW  # the second and the last may have waited for the one before
    assert steps(tmp_path / "run/checkpoints") == [8, 9]
    assert whole.losses == got.losses[:4]


def test_a_copy_is_what_it_was(slowly, tmp_path):
    def work(net):
        t, saver = torch.full((4,), 1.0), Saver(net)
        saver.begin(tmp_path, 1, {"t": t}, {}, {"x": 1})
        t.fill_(2.0)  # training goes on
        there = steps(tmp_path)
        saver.begin(tmp_path, 2, {"t": t}, {}, copy=False)
        before = steps(tmp_path)  # the second waits for the first
        saver.wait()
        saver.wait()
        return [there, before, steps(tmp_path), len(saver.done)]

    told = run_ranks(Mesh.of({"dp": 2}), work)
    assert told[0] == [[], [1], [1, 2], 2]
    assert told[1] == [[], [1], [1, 2], 0]
    assert read_whole(tmp_path / "step-1")[0]["t"].tolist() == [1.0] * 4
    assert read_whole(tmp_path / "step-2")[0]["t"].tolist() == [2.0] * 4


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_is_heard_of_between_steps_and_raised_by_all(rank, tmp_path, monkeypatch):
    plain = saving.write

    def write(path, blocks):
        if f"rank-{rank}" in path.name:
            raise OSError(28, os.strerror(28), "x" * 5000)  # a long name must fit the word left for rank 0
        return plain(path, blocks)

    monkeypatch.setattr(saving, "write", write)

    def work(net):
        saver = Saver(net)
        saver.begin(tmp_path, 1, {f"t{net.rank}": torch.ones(3)}, {})
        saver.rest()
        heard = saver.failed
        try:
            saver.wait()
        except RunFailed as failed:
            return [heard, str(failed)]
        return [heard, ""]

    (heard, first), (_, second) = run_ranks(Mesh.of({"dp": 2}), work)
    assert heard
    assert first == second
    assert f"rank {rank}: No space left on device" in first
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_error_of_the_disk_is_told_too(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("a bug")

    monkeypatch.setattr(saving, "write_index", broken)
    saver = Saver(Net(Mesh(), 0))
    saver.begin(tmp_path, 1, {"t": torch.ones(3)}, {})
    with pytest.raises(RunFailed, match="rank 0: ValueError: a bug"):
        saver.wait()


def test_a_save_is_forced_to_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Files, then the folder that names them, then the rename, then the folder above."""
    order = []
    plain = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append(str(Path(f"/proc/self/fd/{fd}").readlink())), plain(fd))[1])
    rename = saving.commit

    def commit(*args):
        order.append("rename")
        rename(*args)

    monkeypatch.setattr(saving, "commit", commit)
    saver = Saver(Net(Mesh(), 0))
    saver.begin(tmp_path / "c", 1, {"t": torch.ones(3)}, {})
    saver.wait()
    part = str(tmp_path / "c" / "step-1.partial")
    files = [f"{part}/rank-0.safetensors", f"{part}/index.json", part]
    assert order == [str(tmp_path), *files, "rename", str(tmp_path / "c")]
    assert not check(tmp_path / "c" / "step-1")


def test_words_of_ranks_are_of_one_mark():
    def work(net):
        alone = net.words("a")
        net.barrier()
        net.leave_word("a", {"rank": net.rank})
        net.barrier()
        told = net.words("a")
        net.barrier()
        net.leave_word("b" if net.rank else "a", net.rank)
        net.barrier()
        return [alone, told, net.words("b")]

    for told in run_ranks(Mesh.of({"dp": 2}), work):
        assert told == [None, [{"rank": 0}, {"rank": 1}], None]
