"""A user's schedule file: what can be read, and everything that is wrong with one."""

import pytest

from partita.errors import Refused
from partita.program.schedules import read


def said(text, **plan):
    with pytest.raises(Refused) as caught:
        read(text, "mine.txt", **plan)
    for fault in caught.value.faults:
        assert all((fault.what, fault.have, fault.law, fault.cure)), fault
        assert fault.at.startswith("mine.txt")
    return [f.what for f in caught.value.faults]


@pytest.mark.case
def test_remarks_blanks_quotes_and_empty_places():
    schedule = read('# two ranks\n\n0F0, ,0B0,,  # idle\n,"1F0",1I0,1W0\n')
    assert [[str(a) for a in row] for row in schedule.order] == [["0F0", "0B0"], ["1F0", "1I0", "1W0"]]
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 2, 1)
    assert schedule.splits_backward


@pytest.mark.case
def test_placement_follows_from_who_runs_a_stage():
    assert read("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n").placement == (0, 1, 1, 0)


@pytest.mark.case
def test_what_torch_adds_is_read_over():
    text = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert read(text).order == read("0F0,0B0\n1F0,1B0\n").order


@pytest.mark.case
def test_a_pair_that_torch_runs_together_is_read_in_turn():
    schedule = read("0F0,1F0,1B0,(0F1;0B0)OVERLAP_F_B,1F1,1B1,0B1\n")
    assert [str(a) for a in schedule.order[0]] == ["0F0", "1F0", "1B0", "0F1", "0B0", "1F1", "1B1", "0B1"]


@pytest.mark.case
@pytest.mark.parametrize("text", ["", "# nothing\n", ",,\n,\n"])
def test_an_empty_file(text):
    (what,) = said(text)
    assert what == "'mine.txt' holds no action"


@pytest.mark.case
def test_all_words_that_are_no_action_at_once():
    assert said("0F0,F0,0B0\n1G0,1f0,-1F0\n") == [f"{word!r} is not an action" for word in ("F0", "1G0", "1f0", "-1F0")]


@pytest.mark.case
def test_what_is_missing_and_doubled():
    assert said("0F0,0F2,0B0,0B2\n1F0,1F1,1F2,1B0,1I1,1W2,1B2,1F2\n") == [
        "stage 0 has no forward of microbatch 1",
        "stage 0 has no backward of microbatch 1",
        "stage 1 has I but no W of microbatch 1",
        "stage 1 has both a whole and a split backward of microbatch 2",
        "stage 1 has more than one F of microbatch 2",
    ]


@pytest.mark.case
def test_a_stage_left_out_and_a_rank_without_work():
    assert said("0F0,0B0\n,\n2F0,2B0\n") == ["rank 1 runs nothing", "no rank runs stage 1"]


@pytest.mark.case
def test_a_stage_on_two_ranks():
    assert said("0F0,0B0\n1F0,1B0,0F1,0B1,1F1,1B1\n")[0] == "rank 1 runs stage 0, which rank 0 holds"


@pytest.mark.case
def test_order_within_a_rank():
    assert said("0F1,0B0,0F0,0W1,0I1\n") == ["rank 0 runs 0W1 before 0I1", "rank 0 runs 0B0 before 0F0"]


@pytest.mark.case
def test_a_circle_is_named_rank_by_rank():
    with pytest.raises(Refused) as caught:
        read("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "mine.txt")
    (fault,) = caught.value.faults
    assert fault.what == "ranks 0 -> 1 -> 0 wait for each other"
    assert fault.have == (
        "rank 0 stands at 0B0, which needs 1B0: behind 1F1 on rank 1\n"
        "rank 1 stands at 1F1, which needs 0F1: behind 0B0 on rank 0"
    )


@pytest.mark.case
def test_a_rank_that_waits_for_itself():
    (what,) = said("1F0,0F0,1B0,0B0\n")
    assert what == "rank 0 waits for itself"


@pytest.mark.case
def test_two_circles_are_two_faults():
    """Stages 0 and 1 on ranks that stand at each other, stages 2 and 3 of another microbatch likewise."""
    text = "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n3F0,3B0,2F0,2B0,2F1,2B1,3F1,3B1\n"
    assert said(text) == ["ranks 0 -> 1 -> 0 wait for each other", "rank 2 waits for itself"]


@pytest.mark.case
def test_a_file_for_another_plan():
    assert said("0F0,0B0\n1F0,1B0\n", ranks=3, microbatches=4) == [
        "the schedule of 'mine.txt' is not for 3 ranks",
        "the schedule of 'mine.txt' is not for 4 microbatches",
    ]


@pytest.mark.case
@pytest.mark.parametrize(
    ("text", "what"), [("0F999999,0B0\n", "microbatch 999999 cannot be"), ("999999F0\n", "stage 999999 cannot be")]
)
def test_a_slip_of_the_pen_costs_no_memory(text, what):
    assert said(text) == [what]


@pytest.mark.law
def test_many_missing_microbatches_are_said_as_runs():
    line = ",".join(f"0F{k},0B{k}" for k in range(100) if k not in (3, 4, 5, 9))
    assert "stage 0 has no forward of microbatches 3-5, 9" in said(line)
