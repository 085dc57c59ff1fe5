"""What a run survives: a rank killed anywhere, a full disk, Ctrl-C in a save. The curve goes on bit for bit."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import partita as pt
from partita.cli.main import main
from partita.errors import RankLost, Refused, RunFailed
from partita.runtime import metrics, saved, saving
from partita.runtime.checkpoint import check, steps
from partita.strategies import DDP, TensorParallel

pytestmark = pytest.mark.gloo
STEPS = 8


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 4)).double()


def batches(step):
    drawn = torch.Generator().manual_seed(step)
    return {"input": torch.randn(12, 6, generator=drawn).double(), "y": torch.randint(4, (12,), generator=drawn)}


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch["y"])


def optimizer(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def plan(**mesh):
    return pt.Plan(mesh=mesh, strategies=[TensorParallel()] * ("tp" in mesh) + [DDP()] * ("dp" in mesh))


def train(mesh, out=None, steps=STEPS, **more):
    return pt.train(
        plan(**mesh), model=make, batches=batches, loss=loss, optimizer=optimizer, steps=steps, out=out, save_every=2, **more
    )


@pytest.fixture(scope="module")
def whole():
    """The curve and the parameters nobody disturbed, by mesh."""
    kept = {}

    def of(**mesh):
        key = tuple(mesh.items())
        if key not in kept:
            run = train(mesh)
            kept[key] = run.losses, run.state_dict()
        return kept[key]

    return of


def same(run, whole):
    losses, state = whole
    assert run.losses == losses[-len(run.losses) :]
    assert all(torch.equal(t, state[name]) for name, t in run.state_dict().items())


def told(folder):
    """Steps and losses in metrics.jsonl, and its first line."""
    head, *rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return head, [row["step"] for row in rows], [row["loss"] for row in rows]


# ---------------------------------------------------------------- where a rank dies
def at_call(monkeypatch, name, number, do, module=saving):
    """In a rank, when a function is called for the n-th time."""
    plain, parent, calls = getattr(module, name), os.getpid(), []

    def wrapped(*args, **kwargs):
        if os.getpid() != parent:
            calls.append(1)
            if len(calls) == number:
                do()
        return plain(*args, **kwargs)

    monkeypatch.setattr(module, name, wrapped)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


# function of a save, its call that is the last; checkpoints that are there then
MOMENTS = {
    "agreeing": ("prepare", 3, [2, 4]),
    "copying": ("blocks_of", 2, [2]),
    "writing": ("write", 2, [2]),
    "the index": ("write_index", 2, [2]),
    "the rename": ("commit", 3, [2, 4]),
    "forgetting": ("prune", 3, [2, 4, 6]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_killed_in_a_save_loses_nothing_older(moment, monkeypatch, whole, tmp_path):
    name, call, left = MOMENTS[moment]
    at_call(monkeypatch, name, call, die)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank \d of 2 was killed by SIGKILL") as caught:
        train({"dp": 2}, tmp_path / "run")
    assert time.monotonic() - began < 10
    assert f"goes on from step {left[-1]}" in str(caught.value)
    root = tmp_path / "run" / "checkpoints"
    assert steps(root) == left
    assert not any(check(root / f"step-{s}") for s in left)
    monkeypatch.undo()
    run = train({"dp": 2}, resume=tmp_path / "run")
    same(run, whole(dp=2))
    assert len(run.losses) == STEPS - left[-1]
    assert told(tmp_path / "run")[1] == list(range(1, STEPS + 1))


def killer(*at, rank=-1):
    """A progress that kills a rank of each generation at a step."""
    left = list(at)

    def look(line):
        if left and "notice" not in line and line["step"] >= left[0]:
            left.pop(0)
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[rank]), signal.SIGKILL)

    return look


def slowed(step):
    time.sleep(0.02)  # so that whoever watches sees every step
    return batches(step)


# ---------------------------------------------------------------- restarts
def restarting(mesh, folder, steps=60, **more):
    return pt.train(
        plan(**mesh), model=make, batches=slowed, loss=loss, optimizer=optimizer, steps=steps, out=folder, save_every=5, **more
    )


def test_a_lost_rank_is_restarted_and_the_curve_is_bitwise_the_same(tmp_path):
    whole = restarting({"dp": 2, "tp": 2}, tmp_path / "whole")
    run = restarting({"dp": 2, "tp": 2}, tmp_path / "run", restarts=1, progress=killer(20))
    assert run.losses == whole.losses
    assert all(torch.equal(t, whole.state_dict()[name]) for name, t in run.state_dict().items())
    (restart,) = run.restarts
    assert (restart.rank, restart.mesh.ranks) == (3, 4)
    assert restart.step >= 10
    assert "restarted after step" in str(restart)
    head, steps, losses = told(tmp_path / "run")
    assert (steps, losses) == (list(range(1, 61)), run.losses)
    assert head["from_step"] == restart.step
    assert [h["from_step"] for h in head["before"]] == [0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["losses"], summary["steps"]) == (run.losses, 60)
    assert summary["restarts"] == [restart.json()]


def test_the_same_rank_lost_twice_shrinks_the_data_axis(tmp_path):
    whole = restarting({"dp": 3}, tmp_path / "whole")
    notices = []
    kill = killer(15, 30)

    def look(line):
        kill(line)
        notices.extend([line["notice"]] if "notice" in line else [])

    run = restarting({"dp": 3}, tmp_path / "run", restarts=2, progress=look)
    assert [restart.mesh.size("dp") for restart in run.restarts] == [3, 2]
    assert run.plan.mesh.size("dp") == 2
    assert run.losses == pytest.approx(whole.losses, rel=1e-12)
    assert "on 2 ranks, dp = 2" in notices[1]


def test_shrink_does_so_at_once_and_skips_sizes_that_do_not_divide(tmp_path):
    run = restarting({"dp": 4, "tp": 1}, tmp_path / "run", restarts=1, shrink=True, progress=killer(10))
    assert [restart.mesh.size("dp") for restart in run.restarts] == [3]  # of 12 samples
    run = pt.train(
        plan(dp=4), model=make, batches=lambda k: {n: t[:8] for n, t in slowed(k).items()}, loss=loss, steps=30,
        restarts=1, shrink=True, progress=killer(10),
    )  # fmt: skip
    assert [(restart.mesh.size("dp"), restart.step) for restart in run.restarts] == [(2, 0)]  # no folder: from the beginning
    assert len(run.losses) == 30


def test_a_damaged_checkpoint_is_set_aside_and_an_older_one_taken(monkeypatch, whole, tmp_path):
    marker = tmp_path / "once"

    def damage():
        if not marker.exists():
            marker.touch()
            os.truncate(tmp_path / "run/checkpoints/step-6/rank-1.safetensors", 9)
            die()

    at_call(monkeypatch, "prune", 3, damage)
    run = train({"dp": 2}, tmp_path / "run", restarts=1)
    (restart,) = run.restarts
    assert (restart.step, restart.aside) == (4, ("step-6.bad",))
    assert "damaged and set aside: step-6.bad" in str(restart)
    same(run, whole(dp=2))
    assert len(run.losses) == STEPS


def test_a_rank_lost_after_the_last_step_costs_no_step(monkeypatch, whole, tmp_path):
    marker = tmp_path / "once"

    def once():
        if not marker.exists():
            marker.touch()
            die()

    at_call(monkeypatch, "collect", 1, once, saved)
    with pytest.raises(RankLost, match="all 8 steps are done and saved: partita show"):
        train({"dp": 2}, tmp_path / "first")
    marker.unlink()
    run = train({"dp": 2}, tmp_path / "run", restarts=1)
    same(run, whole(dp=2))
    assert run.restarts[0].step == STEPS
    assert run.json()["steps"] == STEPS
    assert (tmp_path / "run/summary.json").is_file()


@pytest.mark.slow
def test_a_stopped_rank_is_restarted_too(whole, tmp_path):
    def look(line):
        if "notice" not in line and line["step"] >= 10 and not stopped:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            stopped.append(os.kill(int(children[0]), signal.SIGSTOP))

    stopped = []
    run = restarting({"dp": 2}, tmp_path / "run", restarts=1, progress=look)
    assert "rank 0 of 2 is stopped" in run.restarts[0].why
    assert len(run.losses) == 60


@pytest.mark.slow
def test_ranks_of_torchrun_save_and_resume_too(tmp_path):
    (tmp_path / "plan.toml").write_text("partita = 1\n" + PLAN)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "-m", "partita", "train"]
    for more in (["plan.toml", "--steps", "6", "--save-every", "2", "-o", "run"], ["--resume", "run", "--steps", "8"]):
        done = subprocess.run([*torchrun, *more], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert steps(tmp_path / "run/checkpoints") == [6, 8]
    assert not check(tmp_path / "run/checkpoints/step-8")
    assert told(tmp_path / "run")[1] == list(range(1, 9))
    done = subprocess.run(
        [*torchrun, "--resume", "run", "--restart", "1"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "torchrun --max-restarts N" in done.stderr


def test_one_loss_too_many_ends_the_run(tmp_path):
    with pytest.raises(RankLost, match=r"1 of 1 restarts were used[\s\S]*goes on from step"):
        restarting({"dp": 2}, tmp_path / "run", restarts=1, progress=killer(10, 20))


def test_what_raises_is_not_restarted():
    def broken(step):
        if step == 2:
            raise ValueError("no good")
        return batches(step)

    said = []
    with pytest.raises(RunFailed, match="ValueError: no good"):
        pt.train(plan(dp=2), model=make, batches=broken, loss=loss, steps=4, restarts=3, progress=said.append)
    assert not [line for line in said if "notice" in line]


# ---------------------------------------------------------------- the disk
def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_in_a_save_ends_the_run_by_name(monkeypatch, whole, tmp_path):
    at_call(monkeypatch, "write", 2, no_space)
    with pytest.raises(RunFailed, match=r"step-4.*rank 0: No space left on device; resume from '.*step-2'") as caught:
        train({"dp": 2}, tmp_path / "run")
    assert "goes on from step 2" in str(caught.value)
    assert [d.name for d in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]
    assert len(told(tmp_path / "run")[1]) <= 6  # the run ended at the next border, not at its end
    monkeypatch.undo()
    same(train({"dp": 2}, resume=tmp_path / "run"), whole(dp=2))


def test_a_disk_that_fills_under_the_metrics_ends_the_run_by_name(monkeypatch, whole, tmp_path):
    at_call(monkeypatch, "add", 5, no_space, metrics)
    with pytest.raises((RunFailed, OSError)):
        train({"dp": 2}, tmp_path / "run")
    monkeypatch.undo()
    file = tmp_path / "run/metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 5, "lo')  # half a line is what a full disk leaves
    same(train({"dp": 2}, resume=tmp_path / "run"), whole(dp=2))
    assert told(tmp_path / "run")[1] == list(range(1, STEPS + 1))


def test_metrics_on_a_full_device_are_said(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFailed, match=r"rank 0 cannot write '.*metrics.jsonl': No space left on device"):
        metrics.add(tmp_path, {"step": 1})


def test_a_command_whose_disk_is_full_says_so_and_exits_with_1(monkeypatch, capsys):
    monkeypatch.setattr("partita.cli.main._run", no_space)
    assert main(["show"]) == 1
    assert capsys.readouterr().err.startswith("RunFailed: No space left on device")


def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match=r"P109[\s\S]*Not a directory"):
        train({"dp": 1}, tmp_path / "file" / "run")


def test_a_refusal_of_the_ranks_leaves_the_folder_as_it_was(tmp_path):
    train({"dp": 1}, tmp_path / "run", steps=2)
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    os.truncate(tmp_path / "run/checkpoints/step-2/rank-0.safetensors", 100)
    for out in (None, tmp_path / "new" / "deep"):
        with pytest.raises(Refused, match="P117"):
            train({"dp": 2}, out, resume=tmp_path / "run")
    assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()} == before
    assert not (tmp_path / "new").exists()


# ---------------------------------------------------------------- the command
PLAN = '[workload]\nmodel = "gpt-tiny"\nbatch = 8\n[mesh]\ndp = 2\n[[strategy]]\nname = "ddp"\n'


def command(tmp_path, *argv, **more):
    (tmp_path / "plan.toml").write_text("partita = 1\n" + PLAN)
    line = [sys.executable, "-m", "partita", "train", "plan.toml", "-o", "run", *argv]
    return subprocess.Popen(line, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **more)


@pytest.mark.slow
def test_a_small_limit_of_file_size_is_a_full_disk(tmp_path):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    run = command(tmp_path, "--steps", "20", "--save-every", "5", preexec_fn=limit)
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (1, "")
    assert "cannot write checkpoint step-5 into 'run/checkpoints': rank 0: File too large" in err
    assert "Traceback" not in err
    assert not list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_in_a_save_ends_with_130_and_a_good_checkpoint(times, tmp_path):
    run = command(tmp_path, "--steps", "100000", "--save-every", "1")
    root = tmp_path / "run/checkpoints"
    while run.poll() is None and not list(root.glob("step-[3-9]*.partial")):
        time.sleep(0.0005)
    for _ in range(times):
        run.send_signal(signal.SIGINT)
        time.sleep(0.05)
    began = time.monotonic()
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert time.monotonic() - began < 10
    assert steps(root)
    assert not any(check(root / f"step-{s}") for s in steps(root))
    if times == 1:
        assert f"stopped after step {steps(root)[-1]}; go on with: partita train --resume run" in err
        assert not list(root.glob("*.partial"))


@pytest.mark.slow
def test_a_stopped_rank_in_a_save_is_named_within_ten_seconds(tmp_path):
    run = command(tmp_path, "--steps", "100000", "--save-every", "1")
    root = tmp_path / "run/checkpoints"
    while run.poll() is None and not list(root.glob("step-[3-9]*.partial")):
        time.sleep(0.0005)
    os.kill(json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["pids"][1], signal.SIGSTOP)
    began = time.monotonic()
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert time.monotonic() - began < 10
    assert "rank 1 of 2 is stopped" in err
    assert "partita train --resume run goes on from step" in err


def test_a_folder_in_use_is_waited_for_and_then_refused(monkeypatch, tmp_path):
    train({"dp": 1}, tmp_path / "run", steps=2)
    lock = "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)"
    code = f"import fcntl, os, sys, time; {lock}; print(1, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE)
    other.stdout.read(1)
    monkeypatch.setattr("partita.api.folder.PATIENCE", 0.3)
    with pytest.raises(Refused, match="in use by a run that goes on"):
        train({"dp": 1}, resume=tmp_path / "run", steps=4)
    other.kill()
    other.wait()
    other.stdout.close()
    assert len(train({"dp": 1}, resume=tmp_path / "run", steps=4).losses) == 2
