"""What the pages say is true: every code has a page whose example is what the door prints; code in pages runs."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from partita.cli.main import main
from partita.errors import CODES, Refused

ROOT = Path(__file__).parents[1]
PAGES = {p.stem: p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "errors").glob("P*.md")}
HEADINGS = ["What happened", "Example", "Law", "What to do"]
SHELL = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<text>.*?)\n```", re.DOTALL)
PYTHON = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<text>.*?)\n```", re.DOTALL)
EXAMPLES = [(code, m["command"], m["text"]) for code, page in sorted(PAGES.items()) for m in SHELL.finditer(page)]
CALLS = [(code, m["code"], m["text"]) for code, page in sorted(PAGES.items()) for m in PYTHON.finditer(page)]
MARKDOWN = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "bench").rglob("*.md")),
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder the examples are typed in."""
    shutil.copytree(ROOT / "docs" / "errors" / "home", tmp_path, dirs_exist_ok=True)
    shutil.copy(ROOT / "examples" / "laptop.toml", tmp_path / "plan.toml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def masked(text):
    """The text without measured numbers: a better memory fold changes no page."""
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text)


def test_every_code_has_a_page_with_the_same_headings():
    assert sorted(PAGES) == sorted(CODES)
    for code, page in PAGES.items():
        assert page.startswith(f"# {code} {CODES[code]}\n")
        assert re.findall(r"^## (.*)$", page, re.MULTILINE) == HEADINGS


def test_every_code_is_raised_by_an_example():
    assert {code for code, _, _ in [*EXAMPLES, *CALLS]} == set(CODES)


@pytest.mark.golden
@pytest.mark.parametrize(("code", "command", "text"), EXAMPLES, ids=[f"{c}-{i}" for i, (c, _, _) in enumerate(EXAMPLES)])
def test_a_commands_example_is_what_it_prints(code, command, text, home, capsys):
    assert main(shlex.split(command)[1:]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.replace(str(home), "/home/you").rstrip() == text
    assert f"[{code}]" in text


@pytest.mark.golden
@pytest.mark.parametrize(("code", "source", "text"), CALLS, ids=[c for c, _, _ in CALLS])
def test_a_calls_example_is_what_it_raises(code, source, text, home):
    with pytest.raises(Refused) as caught:
        exec(compile(source, f"docs/errors/{code}.md", "exec"), {"__name__": "example"})
    assert masked(str(caught.value).replace(str(home), "/home/you")) == masked(text)
    assert f"[{code}]" in text


@pytest.mark.parametrize("path", MARKDOWN, ids=[str(p.relative_to(ROOT)) for p in MARKDOWN])
def test_every_link_between_pages_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_no_page_holds_a_placeholder():
    for path in MARKDOWN:
        assert not re.search(r"\b(TBD|XXX|lorem ipsum|coming soon)\b", path.read_text(encoding="utf-8"), re.IGNORECASE), path


def test_the_figures_of_every_page_are_fresh():
    done = subprocess.run([str(ROOT / "scripts" / "figures"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["start", "test", "check", "size", "venv", "figures", "examples"])
def test_a_script_is_executable_and_parses(name):
    script = ROOT / "scripts" / name
    assert script.stat().st_mode & 0o111
    if script.read_text().startswith("#!/usr/bin/env bash"):
        bash = shutil.which("bash")
        assert bash
        assert "set -euo pipefail" in script.read_text()
