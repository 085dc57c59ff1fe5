"""What the page of pipeline schedules says: its file can be read, its code runs, its drawing is what is drawn."""

import re
from pathlib import Path

import pytest

from partita.pages.gantt import gantt
from partita.program.schedules import SCHEDULES, generate, play, read

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "schedules.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.golden
def test_the_files_and_drawings_of_the_page():
    own, drawing = [body for language, body in BLOCKS if language == "text"]
    schedule = read(own, "page")
    assert (schedule.ranks, schedule.microbatches) == (2, 3)
    made = generate("one_f_one_b", 3, 4)
    assert drawing.splitlines() == gantt(made, play(made), 60).splitlines()[:3]


@pytest.mark.golden
def test_the_code_of_the_page_runs(capsys):
    for code in (body for language, body in BLOCKS if language == "python"):
        exec(compile(code, "docs/reference/schedules.md", "exec"), {"__name__": "page"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == generate_text("zero_bubble", 4, 8)
    assert lines[0].startswith("0.02")


def generate_text(name, ranks, microbatches):
    return ",".join(map(str, generate(name, ranks, microbatches).order[0]))


@pytest.mark.golden
def test_every_schedule_is_on_the_page():
    assert all(f"| {name} |" in PAGE and f"| `{name}` |" in PAGE for name in SCHEDULES)
