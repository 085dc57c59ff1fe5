"""The door's own parts: exit codes, the argument parser's refusals, progress without a thread."""

import io
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from partita.cli import main as door
from partita.cli.bar import Bar, progress
from partita.cli.parser import Parser, overrides, quoted, spoken, writable
from partita.errors import Fault, RankLost, Refused, RunFailed
from partita.plans.overriding import parse


def command(monkeypatch, run):
    """Puts a command in the place of `show`."""
    stand_in = SimpleNamespace(arguments=lambda parser: None, run=run)
    monkeypatch.setattr(door.importlib, "import_module", lambda name: stand_in)
    return door.main(["show"])


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (Refused(Fault("P112", "a", cure="b"), Fault("P108", "c")), 2, ["BadValue [P112] a", "NotFound [P108] c"]),
        (RunFailed("rank 1 ran out of memory"), 1, ["RunFailed: rank 1 ran out of memory"]),
        (RankLost("rank 2 died", 2), 1, ["RankLost: rank 2 died"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
    ],
)
def test_what_goes_wrong_is_one_message_and_an_exit_code(monkeypatch, capsys, raised, code, words):
    def run(args):
        raise raised

    assert command(monkeypatch, run) == code
    out, err = capsys.readouterr()
    assert out == ""
    for word in words:
        assert word in err


def test_a_commands_own_code_is_returned(monkeypatch):
    assert command(monkeypatch, lambda args: 1) == 1


def test_an_unknown_option_is_said_before_a_missing_argument():
    parser = Parser(prog="partita x")
    parser.add_argument("plan")
    parser.add_argument("--steps")
    with pytest.raises(Refused, match=r"unknown argument '--step'[\s\S]*'--steps'\?"):
        parser.read(["--step", "3"])
    with pytest.raises(Refused, match="plan is missing"):
        parser.read([])


@pytest.mark.parametrize("text", ["plain", "with space", 'quo"te', "back\\slash", "3", "true", "ünicode", "new\nline"])
def test_a_quoted_text_is_a_string_to_toml(text):
    assert parse(quoted(text)) == text


def test_overrides_are_pairs_whose_value_may_hold_an_equals_sign():
    assert overrides(SimpleNamespace(sets=["a=1", " mesh.tp = 2", "b=c=d"])) == {"a": "1", "mesh.tp": "2", "b": "c=d"}
    with pytest.raises(Refused) as caught:
        overrides(SimpleNamespace(sets=["a", "=3", "b=1"]))
    assert len(caught.value.faults) == 2


def test_what_an_option_wrote_is_blamed_on_the_option():
    with pytest.raises(Refused) as caught, spoken(data="--data"):
        raise Refused(Fault("P108", "no data", at="--set data"), Fault("P112", "other", at="--set batch"))
    assert [f.at for f in caught.value.faults] == ["--data", "--set batch"]


def test_a_file_to_write_needs_its_folder(tmp_path):
    assert writable(str(tmp_path / "a.toml"), "-o") == tmp_path / "a.toml"
    for path in (tmp_path, tmp_path / "no" / "a.toml"):
        with pytest.raises(Refused):
            writable(str(path), "-o")


def test_progress_is_only_for_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert progress() is None


def test_the_bar_draws_without_a_thread_of_its_own():
    before, stream = threading.active_count(), io.StringIO()
    bar = Bar(Console(file=stream, force_terminal=True, width=100))
    bar({"step": 3, "steps": 10, "loss": 2.5})
    assert threading.active_count() == before
    bar.close()
    assert "3/10" in stream.getvalue()
    assert "loss 2.500" in stream.getvalue()
