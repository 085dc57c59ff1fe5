"""The commands end to end: one JSON object on standard output, the contract's keys, the exit codes."""

import json
import subprocess
import sys

import pytest

from partita.cli.main import main
from partita.plans import load
from partita.strategies import GARDEN

PLAN = """
partita = 1
[workload]
model = "gpt-tiny"
batch = 8
[cluster]
name = "here"
ranks = 2
[mesh]
dp = 2
[[strategy]]
name = "ddp"
"""
ESTIMATE = {
    "plan_hash", "step_seconds", "step_seconds_band", "samples_per_second", "tokens_per_second", "flop_per_second_per_device",
    "mfu", "bubble_fraction", "exposed_communication_seconds", "memory_bytes", "fits", "traffic", "energy_joules",
    "opaque_share",
}  # fmt: skip
TRAIN = {
    "steps", "losses", "step_seconds", "memory_bytes", "resident_bytes", "traffic", "wire_bytes_per_rank", "predicted",
    "error", "run_dir",
}  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path


def said(capsys, *argv, code=0):
    """The one JSON object a command prints."""
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_an_estimate_has_the_keys_of_the_contract(home, capsys):
    got = said(capsys, "estimate", "plan.toml")
    assert set(got) >= ESTIMATE
    assert got["plan_hash"] == load("plan.toml", strategies=GARDEN).hash
    assert got["step_seconds_band"][0] <= got["step_seconds"] <= got["step_seconds_band"][1]
    assert [row["axis"] for row in got["traffic"]] == ["dp"]
    parts = got["memory_bytes"]
    assert parts["peak"] == pytest.approx(sum(size for part, size in parts.items() if part != "peak"))


def test_why_adds_terms_that_add_up_to_the_step(home, capsys):
    got = said(capsys, "estimate", "plan.toml", "--why", "time")
    assert sum(term["seconds"] for term in got["why"]) == pytest.approx(got["step_seconds"], rel=1e-6)
    assert all(term["source"] and term["constant"] for term in got["why"])
    assert main(["estimate", "plan.toml", "--why"]) == 0
    assert "why time" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_is_an_answer(home, capsys):
    big = ("--set", "model=gpt3-175b", "--set", "cluster.name=1x2-h100")
    assert said(capsys, "estimate", "plan.toml", *big)["fits"] is False
    assert main(["estimate", "plan.toml", *big]) == 0
    assert "does not fit" in capsys.readouterr().out


def test_overrides_reach_every_verb(home, capsys):
    less, more = (said(capsys, "estimate", "plan.toml", "--set", f"batch={n}")["step_seconds"] for n in (8, 64))
    assert less < more
    assert said(capsys, "plan", "gpt-tiny", "--on", "cpu", "--ranks", "1", "--set", "layers=3")["plans"][0]["plan"].count(
        "layers = 3"
    )


def test_the_best_plan_is_written_and_is_legal(home, capsys):
    got = said(capsys, "plan", "gpt-tiny", "--on", "here", "--ranks", "2", "--batch", "16", "-o", "best.toml")
    assert set(got) >= {"plans", "rejected", "lower_bound_seconds", "gap", "search_seconds", "candidates"}
    assert set(got["plans"][0]) >= {"plan", "place", "step_seconds", "memory_bytes"}
    assert all(any(c.isdigit() for c in row["reason"]) for row in got["rejected"])
    best = load("best.toml", strategies=GARDEN)
    assert (best.ranks, best.workload.batch) == (2, 16)
    assert said(capsys, "estimate", "best.toml")["step_seconds"] == pytest.approx(got["plans"][0]["step_seconds"])


def test_a_trace_opens_as_chromes_format(home, capsys):
    assert main(["show", "plan.toml", "--trace", "trace.json"]) == 0
    rows = json.loads((home / "trace.json").read_text())["traceEvents"]
    assert {row["args"]["name"] for row in rows if row["name"] == "thread_name"} == {"rank 0", "rank 0: dp"}
    assert any(row["name"] == "all_reduce" and row["dur"] > 0 for row in rows)


@pytest.mark.gloo
def test_train_prints_one_object_and_keeps_a_run_folder(home, capsys):
    got = said(capsys, "train", "plan.toml", "--steps", "5", "-o", "run")
    assert set(got) >= TRAIN
    assert (got["steps"], len(got["losses"])) == (5, 5)
    assert got["error"]["traffic"] == 0
    assert {p.name for p in (home / "run").iterdir()} >= {
        "plan.toml",
        "predicted.json",
        "metrics.jsonl",
        "checkpoints",
        "summary.json",
    }
    assert said(capsys, "show", "run")["losses"] == got["losses"]
    assert main(["show", "run"]) == 0
    assert "predicted" in capsys.readouterr().out
    assert main(["train", "plan.toml", "-o", "run"]) == 2


@pytest.mark.gloo
def test_a_run_folder_moves_and_goes_on(home, capsys):
    whole = said(capsys, "train", "plan.toml", "--steps", "6", "-o", "whole")["losses"]
    first = said(capsys, "train", "plan.toml", "--steps", "3", "-o", "run")["losses"]
    assert str(home) not in "".join(p.read_text() for p in (home / "run").iterdir() if p.suffix in (".toml", ".json", ".jsonl"))
    (home / "run").rename(home / "moved")
    rest = said(capsys, "train", "--resume", "moved", "--steps", "6")["losses"]
    assert first + rest == whole


@pytest.mark.gloo
def test_a_dry_run_starts_no_rank_and_writes_nothing(home, capsys):
    assert main(["train", "plan.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out
    assert [p.name for p in home.iterdir()] == ["plan.toml"]


@pytest.mark.gloo
def test_prove_prints_its_verdict_and_exits_by_it(home, capsys):
    got = said(capsys, "prove", "plan.toml")
    assert set(got) >= {"proved", "promise", "square", "numerics", "traffic", "memory"}
    assert got["proved"] is True
    assert got["numerics"]["max_relative_error"] <= 1e-10


@pytest.mark.gloo
def test_nothing_but_the_object_is_on_standard_output_of_a_process(home):
    command = [sys.executable, "-m", "partita", "train", "plan.toml", "--steps", "3", "--json", "-o", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=home, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 3
    assert "training" not in done.stderr


CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 257, "n_positions": 64, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


@pytest.mark.gloo
def test_a_real_config_trains_and_its_held_out_loss_is_told(home, capsys):
    (home / "config.json").write_text(json.dumps(CONFIG))
    more = ("--set", "model=hf:config.json", "--set", "sequence=16")
    got = said(capsys, "train", "plan.toml", "--steps", "3", "-o", "run", *more)
    assert got["error"]["traffic"] == 0
    assert got["held_out_loss"] == pytest.approx(5.5, abs=1.0)  # ln 257 is 5.55
