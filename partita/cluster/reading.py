"""A cluster file: read with every fault at once.

partita = 1
[cluster]                       # base = a name of the catalogue; or device, per_node, nodes, backend, node, network
base = "4x8-a100"
[device]                        # the keys of catalog/devices.toml
flop.bfloat16 = { value = 250e12, source = "our own gemm sweep", date = "2026-02" }
[links.network]                 # node | network: the keys of catalog/links.toml
bandwidth = 12.5e9
[band]                          # and [interference], oversubscription: the keys of catalog/clusters.toml
high = 1.2
[measured]                      # what a probe writes; it overrides every formula
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from partita.cluster.catalogue import TIERS, assemble, catalogue, flatten, named
from partita.cluster.parts import Cluster, Curve, Measured, Number, Product
from partita.errors import Fault, Refused, refuse

BACKENDS = ("gloo", "nccl")


@dataclass
class _Reader:
    """Collects every fault of a cluster file on the way."""

    faults: list[Fault] = field(default_factory=list)

    def number(self, at: str, leaf: Any) -> Number | None:
        given = leaf.get("value") if isinstance(leaf, Mapping) else leaf
        if isinstance(leaf, Mapping) and (extra := sorted(set(leaf) - {"value", "source", "date"})):
            self.faults.append(Fault("P101", f"unknown key {extra[0]!r} beside a number", cure="value, source, date", at=at))
        if isinstance(given, bool) or not isinstance(given, (int, float)):
            self.faults.append(Fault("P102", f"{given!r} is not a number", cure="a number, or { value, source, date }", at=at))
            return None
        if not 0 <= given < float("inf"):
            self.faults.append(
                Fault("P112", f"{given!r} is out of range", law="sizes, rates and times are finite and not negative", at=at)
            )
            return None
        if isinstance(leaf, Mapping):
            return Number(float(given), str(leaf.get("source", "the user's cluster file")), str(leaf.get("date", "")))
        return Number(float(given))

    def table(self, table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        given = table.get(key, {})
        if isinstance(given, Mapping):
            return given
        self.faults.append(Fault("P102", f"{key} = {given!r} is not a table", cure=f"[{key}]", at=key))
        return {}

    def count(self, table: Mapping[str, Any], key: str, default: int) -> int:
        given = table.get(key, default)
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            self.faults.append(
                Fault("P112", f"{given!r} is no count", law=f"{key} is a whole number above 0", at=f"cluster.{key}")
            )
            return default
        return given

    def choice(self, table: Mapping[str, Any], key: str, default: str, choices: tuple[str, ...]) -> str:
        given = table.get(key, default)
        if given not in choices:
            self.faults.append(Fault("P107", f"unknown {key} {given!r}", cure=", ".join(choices), at=f"cluster.{key}"))
            return default
        return given

    def keys(self, table: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
        for key in table:
            if key not in known:
                where = f"{at}.{key}" if at else key
                self.faults.append(Fault("P101", f"unknown key {key!r}", cure=", ".join(known), at=where))


def from_file(path: Path) -> Cluster:
    """The cluster a file describes.

    Raises:
        Refused: With every fault of the file at once.
    """
    if not path.is_file():
        raise Refused(
            Fault(
                "P108",
                f"no cluster file {str(path)!r}",
                cure="a catalogue name, here, or the path of a cluster TOML",
                at="cluster.name",
            )
        )
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as bad:
        raise Refused(Fault("P109", f"cannot read {path.name!r} as TOML", have=str(bad), at=str(path))) from None
    reader = _Reader()
    cluster = _described(table, path, reader)
    refuse([fault.located(path.name) for fault in reader.faults])
    return cluster


SECTIONS = ("device", "links", "band", "interference", "oversubscription")


def _described(table: Mapping[str, Any], path: Path, reader: _Reader) -> Cluster:
    reader.keys(table, ("partita", "cluster", *SECTIONS, "machine", "measured"), "")
    if table.get("partita") != 1:
        reader.faults.append(
            Fault(
                "P112", f"format {table.get('partita')!r}", law="this release reads format 1", cure="partita = 1", at="partita"
            )
        )
    head = reader.table(table, "cluster")
    base = _base(head, reader)
    numbers = {**base.numbers, **_overrides(table, base.numbers, reader)}
    nodes, per_node = reader.count(head, "nodes", base.nodes), reader.count(head, "per_node", base.per_node)
    backend = reader.choice(head, "backend", base.backend, BACKENDS)
    measured = _measured(reader.table(table, "measured"), reader)
    return Cluster(path.stem, nodes, per_node, backend, numbers, backend == "gloo", measured=measured, notes=base.notes)


def _overrides(table: Mapping[str, Any], known: Mapping[str, Number], reader: _Reader) -> dict[str, Number]:
    """The numbers a file gives; a key nobody reads is a fault."""
    found: dict[str, Number] = {}
    for section in SECTIONS:
        single = section in known  # oversubscription is a number by itself
        given = {section: table[section]} if single and section in table else reader.table(table, section) if not single else {}
        for key, leaf in flatten(given, "" if single else f"{section}.").items():
            if key == "device.title":
                continue
            if key not in known and not key.startswith("device.flop."):
                choices = ", ".join(sorted(k for k in known if k.startswith(section)))
                reader.faults.append(Fault("P101", f"unknown key {key!r}", cure=choices, at=key))
            elif number := reader.number(key, leaf):
                found[key] = number
    return found


def _base(head: Mapping[str, Any], reader: _Reader) -> Cluster:
    """What the file starts from: `base`, or a device of the catalogue with the links it names."""
    reader.keys(head, ("base", "device", "nodes", "per_node", "backend", "node", "network", "title"), "cluster")
    if "base" in head:
        try:
            return named(str(head["base"]))
        except Refused as refused:
            reader.faults += [replace(fault, at="cluster.base") for fault in refused.faults]
            return named("cpu")
    device = reader.choice(head, "device", "cpu", tuple(catalogue("devices")))
    kind = dict(catalogue("clusters")[device if device in catalogue("clusters") else "cpu"])
    for tier in TIERS:
        kind[tier] = reader.choice(head, tier, kind[tier], tuple(catalogue("links")))
    return Cluster("", 1, kind["per_node"], kind["backend"], assemble(kind, device))


def _measured(table: Mapping[str, Any], reader: _Reader) -> Measured:
    """The tables a probe writes; anything that is not of their form is one fault each."""
    if not table:
        return Measured()
    ops, collectives, products, residuals = {}, {}, [], {}
    reader.keys(table, ("source", "ops", "products", "collectives", "residuals"), "measured")
    readers = {
        "ops": lambda row: ops.update({(row["op"], row["dtype"]): _curve(row["points"])}),
        "collectives": lambda row: collectives.update({(row["op"], int(row["ranks"])): _curve(row["points"])}),
        "products": lambda row: products.append(_product(row)),
    }
    for name, read in readers.items():
        rows = table.get(name, [])
        for at, row in enumerate(rows if isinstance(rows, list) else [rows]):
            _row(reader, f"measured.{name}.{at}", partial(read, row))
    _row(
        reader,
        "measured.residuals",
        lambda: residuals.update({str(k): float(v) for k, v in dict(table.get("residuals", {})).items()}),
    )
    return Measured(ops, tuple(products), collectives, residuals, str(table.get("source", "a probe")))


def _row(reader: _Reader, at: str, read: Callable[[], None]) -> None:
    try:
        read()
    except (KeyError, TypeError, ValueError) as bad:
        reader.faults.append(Fault("P112", "not a measured row", have=f"{type(bad).__name__}: {bad}", at=at))


def _curve(points: Any) -> Curve:
    pairs = sorted((float(x), float(y)) for x, y in points)
    if not pairs or min(min(pair) for pair in pairs) <= 0 or len({x for x, _ in pairs}) < len(pairs):
        raise ValueError("points are pairs of positive numbers, each x once")
    return Curve(tuple(x for x, _ in pairs), tuple(y for _, y in pairs))


def _product(row: Any) -> Product:
    count, m, n, k = (int(row[key]) for key in ("count", "m", "n", "k"))
    if min(count, m, n, k, float(row["seconds"])) <= 0:
        raise ValueError("sizes and seconds are positive")
    return Product(str(row["dtype"]), count, m, n, k, float(row["seconds"]), str(row.get("op", "mm")))
