"""The commands under torchrun: one voice, and Ctrl-C saves."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from partita.cli.main import main

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
PLAN = """
partita = 1
[workload]
model = "gpt"
layers = 2
hidden = 32
heads = 2
vocab = 256
sequence = 16
batch = 4
[cluster]
name = "cpu"
ranks = 2
[mesh]
dp = 2
[[strategy]]
name = "ddp"
axis = "dp"
"""
DOOR = """
import os, pathlib, sys
from partita.cli.main import main
code = main(sys.argv[2:])
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(code))
sys.exit(code)
"""
PATIENCE = 240  # seconds: far beyond what a loaded machine needs


@pytest.fixture
def torchrun(tmp_path):
    """Starts a command of ours on two ranks of torchrun; each writes its exit code to a file named by its rank."""
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "door.py").write_text(DOOR)
    (tmp_path / "codes").mkdir()
    started = []

    def start(*command):
        line = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "door.py",
            "codes",
            *command,
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(line, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def codes(folder):
    return {p.name: int(p.read_text()) for p in (folder / "codes").iterdir()}


def steps_in(run):
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") - 1 if file.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_and_is_told_once(torchrun, tmp_path, capsys, number):
    process, run = torchrun("train", "plan.toml", "--steps", "1000000", "-o", "run"), tmp_path / "run"
    end = time.monotonic() + PATIENCE
    while steps_in(run) < 4 and time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.1)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert codes(tmp_path) == {"0": 130, "1": 130}
    done = json.loads((run / "summary.json").read_text())["steps"]
    assert out == ""
    assert err.count(f"stopped after step {done}; go on with: partita train --resume run") == 1
    ours = err.partition("Traceback")[0]  # what follows is torchrun's own, of its SignalException
    assert err.count("Traceback") <= 1
    assert "stopped after step" in ours
    assert steps_in(run) == done
    assert [p.name for p in (run / "checkpoints").iterdir()] == [f"step-{done}"]
    assert main(["train", "--resume", str(run), "--steps", str(done + 2), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == done + 2


def test_a_proof_is_printed_once(torchrun, tmp_path):
    process = torchrun("prove", "plan.toml", "--json")
    out, err = process.communicate(timeout=PATIENCE)
    assert codes(tmp_path) == {"0": 0, "1": 0}, err[-3000:]
    assert json.loads(out)["proved"] is True  # one object, nothing else
