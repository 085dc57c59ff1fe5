"""Every example is short and runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

from partita.plans import load
from partita.strategies import GARDEN

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.gloo
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_an_example_runs(path, tmp_path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.stem)
def test_a_plan_of_the_examples_is_legal(path):
    plan = load(path, strategies=GARDEN)
    assert load(path, strategies=GARDEN).hash == plan.hash
