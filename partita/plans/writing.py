"""Writes nested tables as TOML: what a plan file needs, no more."""

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any


def toml(table: Mapping[str, Any]) -> str:
    """The text of `table`: plain keys, then its tables and arrays of tables; keys whose value is None are left out."""
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and not _is_array(v)}
    lines = _pairs(plain)
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{_key(key)}]", *_pairs(value)]
        elif _is_array(value):
            for item in value:
                lines += ["", f"[[{_key(key)}]]", *_pairs(item)]
    return "\n".join(lines) + "\n"


def _is_array(value: Any) -> bool:
    return isinstance(value, list) and value != [] and all(isinstance(v, Mapping) for v in value)


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(k)} = {_value(v)}" for k, v in table.items() if v is not None]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else f'"{_escaped(key)}"'


def _escaped(text: str) -> str:
    """Text as it stands between the quotes of TOML."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, str):
        lines = [_escaped(line) for line in value.split("\n")]
        return f'"{lines[0]}"' if len(lines) == 1 else '"""\n' + "\n".join(lines) + '"""'
    if isinstance(value, Mapping):
        return "{" + ", ".join(_pairs(value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return value.isoformat() if isinstance(value, date | time) else str(value)
