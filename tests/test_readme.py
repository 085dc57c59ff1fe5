"""The README's code runs and its commands are those there are."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from partita.cli.main import COMMANDS
from partita.strategies import HOUSE

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "start" / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
BLOCKS = [block for page in (README, START) for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)]
LINES = [line.strip() for block in BLOCKS for line in block.splitlines() if shlex.split(line, comments=True)]


def test_the_product_is_on_the_first_screen():
    first = README.splitlines()[:40]
    assert "```python" in first[:12]
    assert any(line.startswith("<!-- figures:") for line in first)
    assert any("scripts/start" in line for line in first)


@pytest.mark.gloo
@pytest.mark.parametrize("code", PYTHON)
def test_the_python_runs(code, tmp_path):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout


def test_every_command_line_is_one_there_is():
    for line in LINES:
        words = shlex.split(line, comments=True)
        assert words[0] in ("partita", "scripts/start", "scripts/test"), line
        assert words[0] != "partita" or words[1] in COMMANDS, line
        assert words[0] == "partita" or (ROOT / words[0]).exists(), line


@pytest.mark.gloo
def test_the_commands_of_the_pages_run_in_order(tmp_path):
    """Typed as they stand, in a folder that has the examples; training is cut to two steps."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    typed = [shlex.split(line, comments=True)[1:] for line in LINES if line.startswith("partita")]
    for words in dict.fromkeys(map(tuple, typed)):
        line, words = shlex.join(words), list(words)
        if words[0] == "train":
            words[words.index("--steps") + 1] = "2"
        command = [sys.executable, "-m", "partita", *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, (line, done.stderr)


def test_every_strategy_is_in_the_table():
    named = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert set(named) == set(HOUSE)
