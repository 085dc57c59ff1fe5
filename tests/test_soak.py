"""The benchmark of deaths, with five of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench" / "resume-after-any-death" / "main.py"


@pytest.mark.slow
@pytest.mark.gloo
def test_five_deaths_at_random_moments_lose_nothing(tmp_path):
    line = [sys.executable, str(BENCH), "--kills", "5", "--seed", "1", "--out", str(tmp_path / "result.json")]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert len(rows) == 8
    assert [r["what"] for r in rows if not r["held"]] == [], done.stderr
