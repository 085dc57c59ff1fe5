"""The house laws a tool can decide: floors, late names, no import inside a function, no `global`, no `hasattr`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import partita
from partita.strategies import GARDEN, HOUSE
from partita.strategy import Strategy

ROOT = Path(__file__).parents[1]
SOURCE = sorted(p for p in (ROOT / "partita").rglob("*.py") if "tests" not in p.parts)
FRONTS = {"partita/__init__.py", "partita/strategies/__init__.py", "partita/cli/main.py"}  # resolve names late
LATE = {  # import by name, each with its reason
    "partita/cli/show.py",  # an export needs torch, no other fact does
    "partita/runtime/models/factory.py",  # a user's own `python:` factory
    "partita/runtime/programs.py",  # a program from the cache needs no torch
    "partita/runtime/task.py",  # transformers, for hf: models alone
}
PUBLIC = [
    "Cluster", "Plan", "Workload", "capture", "check_strategy", "estimate", "load",
    "plan", "probe", "prove", "report", "session", "spawn", "train",
]  # fmt: skip


def broken(path):
    """(line, what) of every construct house law 10 forbids."""
    name = str(path.relative_to(ROOT))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Global | ast.Nonlocal) and isinstance(node, ast.Global):
            yield node.lineno, "global"
        if isinstance(node, ast.Name) and node.id == "hasattr":
            yield node.lineno, "hasattr"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    yield inner.lineno, "an import inside a function"
                if isinstance(inner, ast.Attribute) and inner.attr == "import_module" and name not in FRONTS:
                    yield inner.lineno, "import_module"


@pytest.mark.law
def test_no_import_inside_functions_no_global_no_hasattr():
    found = [(str(p.relative_to(ROOT)), line, what) for p in SOURCE for line, what in broken(p)]
    assert [f for f in found if not (f[2] == "import_module" and f[0] in LATE)] == []


def test_every_module_says_in_one_sentence_what_lives_there():
    silent = [str(p.relative_to(ROOT)) for p in SOURCE if p.stat().st_size and not ast.get_docstring(ast.parse(p.read_text()))]
    assert silent == []


def test_nothing_is_left_to_do():
    words = ("TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error")
    left = [(str(p.relative_to(ROOT)), w) for p in SOURCE for w in words if w in p.read_text()]
    assert left == []


def test_the_front_desk_is_sorted_and_complete():
    assert partita.__all__ == sorted(partita.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(partita))


def test_every_public_name_resolves():
    for name in PUBLIC:
        assert callable(getattr(partita, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        partita.nothing  # noqa: B018


def test_the_front_desk_imports_nothing_until_asked():
    code = "import sys, partita, partita.strategies; print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_plan_its_strategies_and_its_cluster_need_no_torch():
    code = (
        "import sys, partita; from partita.strategies import DDP, TensorParallel;"
        "partita.Plan(mesh={'dp': 2, 'tp': 2}, strategies=[TensorParallel(), DDP()]); partita.Cluster; partita.Workload;"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_no_room_bears_a_verbs_name():
    rooms = {p.stem for p in (ROOT / "partita").iterdir()}
    assert rooms.isdisjoint(PUBLIC)


def test_every_strategy_is_named_after_its_file():
    for name, target in HOUSE.items():
        module, _, cls = target.partition(":")
        assert module.rsplit(".", 1)[-1] == name
        kind = GARDEN[name]
        assert issubclass(kind, Strategy)
        assert (kind.name, kind.__name__) == (name, cls)


def test_the_garden_is_a_mapping():
    assert set(HOUSE) <= set(GARDEN)
    assert len(GARDEN) == len(list(GARDEN))
    assert "nothing" not in GARDEN
    with pytest.raises(KeyError):
        GARDEN["nothing"]


@pytest.mark.law
def test_imports_only_go_down():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout
