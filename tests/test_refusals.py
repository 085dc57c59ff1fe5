"""What the contract refuses, through the door: exit 2, one readable message on standard error, nothing on standard output."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from partita.cli.main import main

NAMES = ["gpt", "llama2-7b", "ddp", "tensor_parallel", "8x8-h100", "2x4-a100", "cpu", "here", "h100", "P104"]
LAPTOP = Path(__file__).parents[1] / "examples" / "laptop.toml"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder to type commands in, with a good plan."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(LAPTOP.read_text())
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("x" * 1000)
    return tmp_path


def refused(capsys, *argv):
    """The message of a refused command."""
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert "Traceback" not in err
    return err


CONTRACT = {  # section 1 and 2: what was wrong -> the command, and what the message says
    "unknown key": (["estimate", "plan.toml", "--set", "hiden=3"], ["UnknownKey [P101]", "'hidden'?", "--set hiden"]),
    "unknown key in a table": (["estimate", "plan.toml", "--set", "cluster.rank=3"], ["[P101]", "'ranks'?"]),
    "wrong type": (["estimate", "plan.toml", "--set", 'layers="4"'], ["WrongType [P102]", "layers", "an integer"]),
    "mesh product": (["prove", "plan.toml", "--set", "mesh.dp=3"], ["MeshMismatch [P103]", "dp = 3 x tp = 2", "ranks = 6"]),
    "heads do not divide hidden": (["estimate", "plan.toml", "--set", "heads=7"], ["DoesNotDivide [P104]", "hidden = 256"]),
    "heads do not divide over tp": (
        ["train", "plan.toml", "--set", "mesh.tp=3", "--set", "cluster.ranks=6", "--set", "batch=30"],
        ["[P104]", "heads = 8, tp = 3", "tp = 1, 2, 4 or 8", "--set mesh.tp"],
    ),
    "batch does not divide": (["estimate", "plan.toml", "--set", "batch=33"], ["[P104]", "data ranks = 2", "batch = 32 or 34"]),
    "unused axis": (["estimate", "plan.toml", "--set", "mesh.pp=1"], ["AxisUse [P105]", "used by no strategy"]),
    "ranks above devices": (["estimate", "plan.toml", "--set", "cluster.name=1x2-h100"], ["WrongRanks [P118]", "devices = 2"]),
    "unknown model": (["plan", "gpt22", "--on", "here"], ["UnknownName [P107]", "'gpt2'?"]),
    "unknown cluster": (["plan", "gpt2", "--on", "8x8-x100"], ["UnknownName [P107]", "8x8-h100"]),
    "missing plan": (["estimate", "plam.toml"], ["NotFound [P108]", "'plan.toml'?"]),
    "missing data": (["train", "--data", "nowhere.txt"], ["NotFound [P108]", "nowhere.txt", "--data"]),
    "empty data": (["train", "plan.toml", "--data", "empty.txt"], ["Empty [P110]", "empty.txt", "--data"]),
    "unreadable data": (["train", "plan.toml", "--data", "/dev/null"], ["Unreadable [P109]", "/dev/null"]),
    "a folder for a plan": (["estimate", "used"], ["Unreadable [P109]", "'used' is a folder"]),
    "a used folder": (["train", "plan.toml", "-o", "used"], ["FolderInUse [P113]", "'used' is in use"]),
    "resume from nothing": (["train", "--resume", "nowhere"], ["NotFound [P108]", "'nowhere' does not exist"]),
    "resume from no run": (["train", "--resume", "used"], ["NotFound [P108]", "'used' is no run folder"]),
    "no HTML yet": (["show", "plan.toml", "--html", "x.html"], ["NotSupported [P115]"]),
    "unknown command": (["trian"], ["UnknownName [P107]", "'train'?", "plan, estimate, train, prove, show, probe"]),
    "no command": ([], ["MissingKey [P119]", "plan, estimate, train"]),
    "unknown option": (["estimate", "plan.toml", "--jsn"], ["UnknownKey [P101]", "'--json'?"]),
    "missing argument": (["prove"], ["MissingKey [P119]", "PLAN is missing"]),
    "a word too many": (["estimate", "plan.toml", "more"], ["UnknownKey [P101]", "'more'"]),
    "bad count": (["train", "--steps", "-5"], ["--steps"]),
    "bad count of zero": (["train", "--steps", "0"], ["BadValue [P112]", "--steps"]),
    "bad size": (["plan", "gpt2", "--on", "here", "--memory", "70 gigs"], ["BadValue [P112]", "GiB"]),
    "bad aim": (["plan", "gpt2", "--on", "here", "--minimise", "cost"], ["[P107]", "time, memory, traffic, energy"]),
    "half an override": (["estimate", "plan.toml", "--set", "batch"], ["BadValue [P112]", "--set batch=64"]),
    "a probe has no plan": (["probe", "--set", "batch=3"], ["UnknownKey [P101]", "leave --set out"]),
    "unknown name": (["show", "gtp2"], ["UnknownName [P107]", "'gpt2'?"]),
    "a run that is none": (["show", "used"], ["NotFound [P108]", "is no run folder"]),
    "a trace of nothing": (["show", "gpt2", "--trace", "t.json"], ["MissingKey [P119]", "--trace"]),
    "nowhere to write": (["plan", "gpt2", "--on", "here", "-o", "no/such/plan.toml"], ["NotFound [P108]", "-o"]),
    "a folder to write": (["plan", "gpt2", "--on", "here", "-o", "used"], ["Unreadable [P109]", "-o"]),
}


@pytest.mark.case
@pytest.mark.parametrize(("argv", "words"), CONTRACT.values(), ids=CONTRACT.keys())
def test_refused_with_exit_2_and_nothing_on_standard_output(argv, words, home, capsys):
    message = refused(capsys, *argv)
    for word in words:
        assert word in message
    assert "docs: errors/P1" in message


def test_json_does_not_change_a_refusal(home, capsys):
    assert refused(capsys, "estimate", "plan.toml", "--json", "--set", "heads=7").startswith("DoesNotDivide [P104]")


def test_two_faults_in_one_file_are_reported_together(home, capsys):
    text = LAPTOP.read_text().replace("layers = 4", "layers = true").replace("tp = 2", "tp = 3", 1)
    (home / "plan.toml").write_text(text)
    message = refused(capsys, "train", "plan.toml")
    assert "WrongType [P102]" in message
    assert "MeshMismatch [P103]" in message
    assert "plan.toml: workload.layers" in message
    assert "plan.toml: mesh" in message


def test_the_right_order_is_shown(home, capsys):
    head, first, second = LAPTOP.read_text().split("[[strategy]]", 2)
    (home / "plan.toml").write_text("[[strategy]]".join([head, f"{second}\n", first]))
    message = refused(capsys, "estimate", "plan.toml")
    assert "WrongOrder [P106]" in message
    assert "try    tensor_parallel, ddp" in message


def test_a_refused_plan_file_needs_no_torch(home):
    bad = ["plan.toml", "--set", "heads=7"]
    commands = (
        ["estimate", *bad],
        ["prove", *bad],
        ["train", *bad],
        ["plan", "gtp", "--on", "here"],
        ["train", "--data", "no"],
    )
    for argv in (*commands, ["--help"], ["train", "--help"], ["--version"], ["show", "gpt2"], ["show"], ["show", "plan.toml"]):
        code = f"import sys; from partita.cli.main import main; main({argv!r}); sys.exit('torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=home, check=False)
        assert done.returncode == 0, (argv, done.stderr)


def test_show_lists_what_there_is_as_one_json_object(home, capsys):
    assert main(["show", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in got["strategies"]} >= {"ddp", "tensor_parallel"}
    assert {row["name"] for row in got["sizes"]} >= {"gpt2", "gpt3-175b", "llama2-7b", "llama3-8b", "llama3-405b"}


@pytest.mark.parametrize("name", NAMES)
def test_show_tells_the_facts_of_a_name(name, home, capsys):
    assert main(["show", name, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert name in facts.values()
    assert main(["show", name]) == 0
    assert name in capsys.readouterr().out


def test_show_tells_a_plan_and_who_sits_where(home, capsys):
    assert main(["show", "plan.toml", "--json", "--set", "batch=64"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["workload"]["batch"] == 64
    assert got["ranks"] == [{"rank": 0, "dp": 0, "tp": 0}, {"rank": 1, "dp": 0, "tp": 1}, {"rank": 3, "dp": 1, "tp": 1}]


def test_show_tells_how_far_an_unfinished_run_came(home, capsys):
    run = home / "run"
    run.mkdir()
    (run / "predicted.json").write_text('{"step_seconds": 1.0}')
    (run / "metrics.jsonl").write_text('{"pids": [1]}\n{"step": 3, "loss": 2.5}\n{"step": 4, "lo')
    assert main(["show", "run", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert (got["finished"], got["steps"], got["last"]["loss"]) == (False, 3, 2.5)


def test_a_broken_pipe_is_no_traceback(home):
    command = f"{sys.executable} -m partita show | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.strip() == "models"


def test_help_of_every_command_exits_0(home, capsys):
    for argv in (["--help"], ["--version"], *([c, "--help"] for c in ("plan", "estimate", "train", "prove", "show", "probe"))):
        assert main(argv) == 0
        assert "partita" in capsys.readouterr().out
