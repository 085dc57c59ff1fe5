"""Clusters of the catalogue, by name: `cpu`, `8x8-h100`, `16x4-a100`."""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from partita.cluster.parts import Cluster, Number
from partita.errors import Fault, Refused

TIERS = ("node", "network")


@cache
def catalogue(table: str) -> dict[str, Any]:
    """The parsed catalogue file `table`: devices, links or clusters."""
    return tomllib.loads((resources.files("partita") / "catalog" / f"{table}.toml").read_text("utf-8"))


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> leaves; a table with `value` is a leaf."""
    out: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and "value" not in value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + key] = value
    return out


def numbers_in(table: Mapping[str, Any], prefix: str) -> dict[str, Number]:
    leaves = {key: leaf for key, leaf in flatten(table).items() if isinstance(leaf, Mapping)}
    return {prefix + key: Number(float(leaf["value"]), leaf["source"], leaf["date"]) for key, leaf in leaves.items()}


def assemble(kind: Mapping[str, Any], device: str) -> dict[str, Number]:
    numbers = numbers_in(catalogue("devices")[device], "device.") | numbers_in(kind, "")
    for tier in TIERS:
        numbers |= numbers_in(catalogue("links")[kind[tier]], f"links.{tier}.")
    return numbers


def named(name: str) -> Cluster:
    """A cluster of the catalogue: `cpu`, `8x8-h100`, `16x4-a100`.

    Raises:
        Refused: P107 with what there is.
    """
    kinds = catalogue("clusters")
    match = re.fullmatch(r"(?:([1-9]\d*)x([1-9]\d*)-)?([a-z][a-z0-9_]*)", name)
    if not match or match[3] not in kinds:
        known = ", ".join(f"8x8-{kind}" if kind != "cpu" else kind for kind in kinds)
        law = "a cluster is a catalogue name, NxM-DEVICE (N nodes of M devices), here, or the path of a cluster file"
        raise Refused(
            Fault("P107", f"no cluster {name!r}", law=law, cure=f"here, {known}, or a path ending in .toml", at="cluster.name")
        )
    kind = kinds[match[3]]
    nodes, per_node = (int(match[1]), int(match[2])) if match[1] else (1, kind["per_node"])
    shared = kind["backend"] == "gloo"
    return Cluster(name, nodes, per_node, kind["backend"], assemble(kind, kind["device"]), shared)
