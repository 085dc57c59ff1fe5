"""Numbers reach the pages from result files only: a block is a table of the rows that have its keys, else "not measured"."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def house(tmp_path):
    """A small copy of the repository's pages."""
    for name in ("scripts", "docs", "bench/claim/results", "code"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "figures", tmp_path / "scripts")
    (tmp_path / "README.md").write_text(
        "<!-- figures: bench/*/results/*.json | table: what, measured -->\nold\n<!-- /figures -->\n"
        "<!-- figures: bench/*/results/*.json | value: machine.cores -->\n<!-- /figures -->\n"
    )
    (tmp_path / "code" / "a.py").write_text("import x\n\n\n@x.y\nclass A:\n    b = 1\n\n\nc = 2\n")
    (tmp_path / "docs" / "a.md").write_text("<!-- live: code/a.py:A -->\n<!-- /live -->\n")
    return tmp_path


def run(house, *argv):
    return subprocess.run([str(house / "scripts" / "figures"), *argv], capture_output=True, text=True, check=False).returncode


def test_without_results_a_block_says_so(house):
    assert run(house) == 0
    assert (house / "README.md").read_text().count("not measured") == 2


def test_rows_become_a_table_and_a_second_run_changes_nothing(house):
    rows = [{"what": "loss | nats", "measured": 2.51234}, {"what": "held", "measured": True}, {"what": "no number"}]
    (house / "bench/claim/results/r.json").write_text(json.dumps({"rows": rows, "machine": {"cores": 2}}))
    assert run(house, "--check") == 1
    assert run(house) == 0
    text = (house / "README.md").read_text()
    assert "| what | measured |\n| --- | --- |\n| loss \\| nats | 2.512 |\n| held | yes |\n<!--" in text
    assert "machine.cores -->\n2\n<!--" in text
    assert run(house, "--check") == 0


def test_live_code_is_what_stands_in_the_file(house):
    run(house)
    assert "```py\n@x.y\nclass A:\n    b = 1\n```\n" in (house / "docs" / "a.md").read_text()
