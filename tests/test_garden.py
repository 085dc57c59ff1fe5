"""Outsiders' strategies come by entry point; what cannot be imported or is no strategy is refused with the reason."""

import sys
from importlib.metadata import EntryPoint

import pytest

import partita.strategies as garden
from partita.errors import Refused
from partita.plans import load_text
from partita.strategies import GARDEN

OUTSIDE = """
from dataclasses import dataclass
from typing import ClassVar
from partita.strategy import Place, Promise, Strategy

@dataclass(frozen=True)
class Mine(Strategy):
    '''A method of one's own.'''
    name: ClassVar[str] = "mine"
    place: ClassVar[Place] = Place.DATA
    promise: ClassVar[Promise] = Promise.EXACT
    axis: str = "dp"
    width: int = 3
    def __post_init__(self):
        if self.width == 7:
            raise ValueError("seven is taken")
    def check(self, program, mesh): return []
    def rewrite(self, program, mesh): return program
    def apply(self, site): pass
    @classmethod
    def cases(cls): return ()

wrong = 3
"""
PLAN = '[workload]\nmodel = "gpt"\n[mesh]\ndp = 2\n[[strategy]]\nname = "mine"\n'


@pytest.fixture
def outside(tmp_path, monkeypatch):
    (tmp_path / "outside_package.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("outside_package", None)

    def points(target):
        found = [EntryPoint("mine", target, garden.GROUP)]
        monkeypatch.setattr(garden, "entry_points", lambda group: found)

    return points


def read(text=PLAN):
    return load_text(text, strategies=GARDEN)


def test_an_outsiders_strategy_is_found_by_entry_point(outside):
    outside("outside_package:Mine")
    assert "mine" in GARDEN
    plan = read(f"{PLAN}width = 5\n")
    assert (plan.strategies[0].name, plan.strategies[0].width) == ("mine", 5)
    assert load_text(plan.to_toml(), strategies=GARDEN) == plan


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("outside_package:Nothing", "P108", "AttributeError"),
        ("no_such_package:Mine", "P108", "ModuleNotFoundError"),
        ("outside_package:wrong", "P102", "is no strategy"),
    ],
)
def test_what_cannot_be_a_strategy_is_refused(outside, target, code, words):
    outside(target)
    with pytest.raises(Refused) as caught:
        read()
    assert [f.code for f in caught.value.faults] == [code]
    assert words in str(caught.value)
    assert "strategy[0].name" in caught.value.faults[0].at


def test_a_strategys_own_refusal_of_a_setting_has_its_place(outside):
    outside("outside_package:Mine")
    with pytest.raises(Refused) as caught:
        read(f"{PLAN}width = 7\n")
    assert "seven is taken" in str(caught.value)
    assert caught.value.faults[0].at == "plan.toml: strategy.mine"
