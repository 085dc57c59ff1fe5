"""Applies --set key=value to the parsed tables of a plan file.

A plain key belongs to [workload]; a dotted one says its table: ``mesh.tp=2``, ``cluster.ranks=4``, ``strategy.ddp.bucket=4096``
(a strategy is found by its name, else by its axis).
"""

import tomllib
from collections.abc import Mapping
from typing import Any

from partita.errors import Fault
from partita.plans.fields import nearest

ROOMS = ("workload", "cluster", "mesh", "strategy")


def override(table: dict[str, Any], overrides: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str], list[Fault]]:
    """The changed table, each changed place with the key that changed it, and a fault for every key that leads nowhere."""
    places: dict[str, str] = {}
    faults: list[Fault] = []
    for key, text in overrides.items():
        room, _, rest = key.partition(".") if "." in key else ("workload", ".", key)
        room, rest = ("", key) if key == "partita" else (room, rest)
        if room == "strategy":
            target, place, fault = _strategy(table, rest, key)
        else:
            target, place, fault = _plain(table, room, rest, key)
        if fault:
            faults.append(fault)
        elif target is not None:
            target[place.rsplit(".", 1)[-1]] = parse(text)
            places[place] = key
    return table, places, faults


def parse(text: str) -> Any:
    """The TOML value of a text; what is no TOML value is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # what TOML cannot say, a number of thousands of digits among it
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _plain(table: dict[str, Any], room: str, rest: str, key: str) -> tuple[dict[str, Any] | None, str, Fault | None]:
    if room == "":
        return table, rest, None
    if room not in ROOMS or not rest or "." in rest:
        law = "a plain key belongs to [workload]; a dotted one names its table: " + ", ".join(f"{r}.…" for r in ROOMS)
        close = nearest(room, ROOMS)
        cure = close if close.endswith("?") else "batch=64, mesh.dp=2, cluster.ranks=4, strategy.ddp.axis=dp"
        return None, "", Fault("P101", f"unknown key {key!r}", law=law, cure=cure, at=f"--set {key}")
    target = table.setdefault(room, {})
    return (target if isinstance(target, dict) else None), f"{room}.{rest}", None


def _strategy(table: dict[str, Any], rest: str, key: str) -> tuple[dict[str, Any] | None, str, Fault | None]:
    who, _, name = rest.rpartition(".")
    rows = [r for r in table.get("strategy", []) if isinstance(r, dict)] if isinstance(table.get("strategy", []), list) else []
    by_name = [r for r in rows if r.get("name") == who]
    chosen = by_name or [r for r in rows if r.get("axis") == who]
    if who and len(chosen) == 1:
        index = next(i for i, row in enumerate(rows) if row is chosen[0])
        return chosen[0], f"strategy[{index}].name" if name == "name" else f"strategy.{chosen[0].get('name')}.{name}", None
    names = [str(r.get("name")) for r in rows]
    cure = ", ".join(f"strategy.{n}.{name or 'axis'}" for n in names) or "the plan has no strategies"
    what = f"{key!r} names {len(chosen) or 'no'} strateg{'ies' if len(chosen) > 1 else 'y'} of the plan"
    return (
        None,
        "",
        Fault("P101", what, f"strategies: {', '.join(names) or 'none'}", "name.key or axis.key", cure, f"--set {key}"),
    )
