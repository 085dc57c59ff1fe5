"""A schedule of the user's own: read beside the plan, refused by line, and the same pipeline as the published one it copies."""

from dataclasses import replace

import pytest

import partita
from partita.cli.main import main
from partita.errors import Refused
from partita.mesh import Mesh
from partita.plans import Plan, load_text
from partita.program.schedules import one_f_one_b, write, zbv
from partita.proof.shrink import shrink_mesh
from partita.strategies import GARDEN, OneFOneB, OwnSchedule
from partita.strategy import TextFile

PLAN = """
[workload]
model = "gpt"
layers = 4
hidden = 32
heads = 4
sequence = 16
batch = 8

[mesh]
pp = 2

[[strategy]]
name = "own_schedule"
microbatches = 4
file = "mine.txt"
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with a plan and the schedule it names."""
    folder = tmp_path / "plans"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "plan.toml").write_text(PLAN)
    (folder / "mine.txt").write_text("# as 1F1B\n" + write(one_f_one_b(2, 4)))
    return folder


def refused(text, folder):
    with pytest.raises(Refused) as caught:
        load_text(text, strategies=GARDEN, folder=folder)
    return caught.value.faults


@pytest.mark.case
def test_the_text_counts_and_not_its_path(home):
    plan = partita.load("plan.toml")
    assert plan.strategies[0].file.name == "mine.txt"
    (home / "mine.txt").rename(home / "yours.txt")
    assert partita.load("plan.toml", {"strategy.own_schedule.file": "yours.txt"}).hash == plan.hash
    (home / "yours.txt").write_text(write(one_f_one_b(2, 4)).replace("0F0,", "0F0, ,"))
    assert partita.load("plan.toml", {"strategy.own_schedule.file": "yours.txt"}).hash != plan.hash


@pytest.mark.case
def test_a_plan_that_is_written_holds_the_text(home):
    plan = partita.load("plan.toml")
    (home / "mine.txt").unlink()
    text = plan.to_toml(home)
    assert '"""\n# as 1F1B\n0F0,' in text
    assert load_text(text, strategies=GARDEN) == plan
    one_line = OwnSchedule(file=TextFile("0F0,0B0,0F1,0B1"), microbatches=2)
    alone = Plan(plan.workload, mesh={"pp": 1}, strategies=[one_line])
    assert load_text(alone.to_toml(), strategies=GARDEN).strategies[0].schedule(1) == one_line.schedule(1)


@pytest.mark.case
def test_every_fault_of_the_file_at_once_with_its_line_beside_those_of_the_plan(home):
    (home / "mine.txt").write_text("# remark\n0F0,0B0,0F1,0B1,0F1\n\n1F0,1B0,1F1,1I1\n")
    faults = refused(PLAN.replace("heads = 4", "heads = 5"), home)
    place = "plan.toml: strategy.own_schedule.file (mine.txt"
    assert [(f.code, f.at) for f in faults] == [
        ("P104", "plan.toml: workload.heads"),
        ("P120", f"{place})"),
        ("P120", f"{place}: line 2, rank 0)"),
        ("P120", f"{place}: line 4, rank 1)"),
    ]
    assert [f.what for f in faults][1:] == [
        "the schedule of 'mine.txt' is not for 4 microbatches",
        "stage 0 has more than one F of microbatch 1",
        "stage 1 has I but no W of microbatch 1",
    ]


@pytest.mark.case
@pytest.mark.parametrize(
    ("file", "code", "words"),
    [
        ("../mine.txt", "P112", "leaves the folder of the plan"),
        ("none.txt", "P108", "does not exist"),
        (".", "P109", "is no file"),
        ("bytes.txt", "P109", "is not UTF-8"),
        ("link.txt", "P112", "leaves the folder of the plan"),
    ],
)
def test_a_file_that_cannot_be_had_is_refused(file, code, words, home):
    outside = home.parent / "mine.txt"
    outside.write_text(write(one_f_one_b(2, 4)))
    (home / "bytes.txt").write_bytes(b"0F0\xff")
    (home / "link.txt").symlink_to(outside)
    (fault,) = refused(PLAN.replace("mine.txt", file), home)
    assert (fault.code, fault.at) == (code, "plan.toml: strategy.own_schedule.file")
    assert words in fault.what
    assert all((fault.law, fault.cure))


@pytest.mark.case
def test_an_absolute_path_may_lie_elsewhere(home):
    outside = home.parent / "mine.txt"
    outside.write_text(write(one_f_one_b(2, 4)))
    assert load_text(PLAN.replace("mine.txt", str(outside)), strategies=GARDEN, folder=home).strategies


@pytest.mark.case
def test_a_file_for_other_ranks_is_refused(home):
    (home / "mine.txt").write_text(write(one_f_one_b(4, 4)))
    with pytest.raises(Refused) as caught:
        partita.estimate(partita.load("plan.toml"))
    (fault,) = caught.value.faults
    assert (fault.code, fault.have) == ("P120", "4 in the file, 2 in the plan")
    assert fault.at == "strategy.own_schedule.file (mine.txt)"


@pytest.mark.case
def test_python_is_told_to_read_the_file():
    with pytest.raises(Refused) as caught:
        OwnSchedule(file="mine.txt", microbatches=2)
    assert caught.value.faults[0].cure == "TextFile.read('mine.txt')"


@pytest.mark.law
def test_a_copy_of_a_published_schedule_has_its_figures(home):
    own = partita.load("plan.toml")
    other = Plan(own.workload, mesh={"pp": 2}, strategies=[OneFOneB(microbatches=4)])
    got, expected = partita.estimate(own).figures, partita.estimate(other).figures
    assert replace(got, notes=()) == replace(expected, notes=())
    assert got.notes[-2].startswith("own_schedule: 2 stages")


@pytest.mark.case
def test_show_draws_it(home, capsys):
    assert main(["show", "plan.toml"]) == 0
    assert "rank 1" in capsys.readouterr().out


@pytest.mark.law
def test_a_proof_keeps_the_ranks_it_is_written_for():
    own = OwnSchedule(file=TextFile(write(zbv(4, 8))), microbatches=8)
    assert shrink_mesh(Mesh.of({"dp": 4, "pp": 4}), None, fixed=own.fixed) == Mesh.of({"dp": 2, "pp": 4})
