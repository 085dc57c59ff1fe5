"""Reads a TOML table into the fields of a dataclass, collecting every fault with its place.

A field's annotation is its type: an `int` takes no bool, a `float` takes an integer, a `tuple[str, ...]` takes a list, a
`TextFile` a string: whoever knows the folder reads the file.
Beyond its type a field may have a law, looked up by its name in `LAWS`; numbers are finite everywhere.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Union

from partita.errors import Fault
from partita.strategy import TextFile

DTYPES = ("float32", "float64", "bfloat16", "float16")
HALF = ("bfloat16", "float16")
CHOICES = {  # field -> the names it may hold
    "dtype": DTYPES,
    "master": DTYPES,
    "reduce_dtype": DTYPES,
    "optimizer": ("adamw", "sgd"),
    "schedule": ("constant", "cosine"),
}


@dataclasses.dataclass(frozen=True)
class Law:
    """What a number must obey beyond its type."""

    holds: Callable[[float], bool]
    text: str
    cure: str


SIZE = Law(lambda v: v >= 1, "a size is at least 1", "1 or more")
COUNT = Law(lambda v: v >= 0, "a count is never negative; what is off is left out", "0 or more, or leave the key out")
POSITIVE = Law(lambda v: v > 0, "it must be above 0; what is off is left out", "a number above 0, or leave the key out")
LAWS = {
    "learning_rate": POSITIVE,
    "clip": POSITIVE,
    "rope_theta": POSITIVE,
    "dropout": Law(lambda v: 0 <= v < 1, "a share of values to drop lies in [0, 1)", "0.0 or more, below 1.0"),
    "warmup": COUNT,
    "horizon": SIZE,
    "seed": Law(lambda v: 0 <= v < 1 << 63, "a seed is a 63-bit count", "0 or more"),
    "vocab": Law(lambda v: v >= 2, "a vocabulary of one token has nothing to predict", "2 or more; 256 for bytes"),
}
_KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "a table"}
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", TextFile: "the path of a text file"}


def nearest(name: str, valid: Iterable[str]) -> str:
    """The cure of a misspelt name: the nearest spelling, else all valid ones."""
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, 1, 0.6)
    return f"{close[0]!r}?" if close else (", ".join(names) or "(there is none)")


def read(
    table: Mapping[str, Any], hints: Mapping[str, Any], at: str, law: Callable[[str], Law | None]
) -> tuple[dict[str, Any], list[Fault]]:
    """The values of `table` that are keys of `hints`, converted, and a fault for each that is wrong."""
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for key in (k for k in table if k in hints):
        place = f"{at}.{key}"
        fits, value = convert(table[key], hints[key])
        fault = judge(key, value, place, law(key)) if fits else wrong_type(key, table[key], hints[key], place)
        values[key] = value
        if fault:
            faults.append(fault)
    return values, faults


def unknown_keys(table: Mapping[str, Any], valid: Iterable[str], at: str) -> list[Fault]:
    """A fault for each key of `table` that is not in `valid`."""
    valid = list(valid)
    return [
        Fault(
            "P101",
            f"unknown key {key!r} in [{at}]" if at else f"unknown table or key {key!r}",
            have=f"{key} = {table[key]!r}",
            law="a key that nothing reads would be silently ignored",
            cure=nearest(key, valid),
            at=f"{at}.{key}" if at else key,
        )
        for key in table
        if key not in valid
    ]


def convert(value: Any, hint: Any) -> tuple[bool, Any]:
    """Whether `value` is of type `hint`, and the value as the dataclass holds it."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        for arm in typing.get_args(hint):
            fits, got = convert(value, arm)
            if fits:
                return True, got
        return False, value
    if origin is tuple:
        item = typing.get_args(hint)[0]
        fits = isinstance(value, list | tuple) and all(convert(v, item)[0] for v in value)
        return fits, tuple(convert(v, item)[1] for v in value) if fits else value
    if origin is typing.Literal:
        return value in typing.get_args(hint), value
    if hint is TextFile:
        return isinstance(value, str | TextFile), value
    if hint in (int, float):
        fits = isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
        return fits, float(value) if fits and hint is float and abs(value) < 1 << 63 else value
    return isinstance(value, hint or type(None)), value


def judge(key: str, value: Any, at: str, law: Law | None) -> Fault | None:
    """What is wrong with a value of the right type."""
    if key in CHOICES and value is not None and value not in CHOICES[key]:
        names = CHOICES[key]
        why = f"{key} is one of {len(names)} names"
        return Fault("P107", f"unknown {key} {value!r}", f"{key} = {value!r}", why, ", ".join(names), at)
    if isinstance(value, float) and not math.isfinite(value):
        cure = law.cure if law else "a finite number"
        return Fault("P112", f"{key} = {value} is no finite number", f"{key} = {value}", "NaN and infinity spread", cure, at)
    if isinstance(value, int) and abs(value) >= 1 << 63:
        have = f"{key} has {value.bit_length()} bits"
        return Fault("P112", f"{key} is out of range", have, "an integer of TOML has 64 bits", "a smaller number", at)
    if value == "":
        return Fault("P112", f"{key} is empty", law="what is off is left out", cure="a value, or leave the key out", at=at)
    if law and isinstance(value, int | float) and not isinstance(value, bool) and not law.holds(value):
        return Fault("P112", f"{key} = {value!r} is out of range", f"{key} = {value!r}", law.text, law.cure, at)
    return None


def wrong_type(key: str, value: Any, hint: Any, at: str) -> Fault:
    """The fault of a value that is not of its type."""
    return Fault(
        "P102",
        f"{key} = {value!r} is not {describe(hint)}",
        have=kind_of(value),
        law=f"{key} is {describe(hint)}",
        cure=_example(value, hint),
        at=at,
    )


def kind_of(value: Any) -> str:
    """The type of a TOML value in words."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")


def describe(hint: Any) -> str:
    """A type in words: int | None -> "an integer"."""
    origin, arms = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(a) for a in arms if a is not type(None))
    if origin is tuple:
        return f"a list, each {describe(arms[0])}"
    if origin is typing.Literal:
        return " or ".join(map(repr, arms))
    return _WORDS.get(hint, str(getattr(hint, "__name__", hint)))


def _example(value: Any, hint: Any) -> str:
    """The same value in the right type, where one can tell."""
    if isinstance(value, str) and "a string" not in describe(hint):
        for kind in (int, float):
            try:
                return f"{kind(value)} without quotes" if convert(kind(value), hint)[0] else describe(hint)
            except ValueError:
                continue
    if isinstance(value, float) and value.is_integer() and convert(int(value), hint)[0]:
        return str(int(value))
    return describe(hint)
