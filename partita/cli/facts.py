"""Facts the catalogue holds, as plain data: models, strategies, clusters, devices, plans, runs."""

import dataclasses
import inspect
import json as plain
from pathlib import Path
from typing import Any

from partita.cluster import catalogue, cluster_of
from partita.errors import CODES, Fault, Refused
from partita.plans import Plan, cluster_table, named
from partita.strategies import GARDEN
from partita.strategy import Strategy
from partita.workload import MODELS


def names() -> list[str]:
    """Every name `show` knows."""
    kinds = catalogue("clusters")
    clusters = [name if name == "cpu" else f"8x8-{name}" for name in kinds]
    return [*MODELS, *named(), *GARDEN, "here", "testbed", *clusters, *catalogue("devices"), *catalogue("links"), *CODES]


def everything() -> dict[str, Any]:
    """What there is, by kind."""
    strategies = []
    for name in GARDEN:
        kind = GARDEN[name]
        strategies.append({"name": name, "place": kind.place.name.lower(), "promise": kind.promise.value, "what": _first(kind)})
    kinds = catalogue("clusters")
    return {
        "models": [{"name": name, "what": _first(model)} for name, model in MODELS.items()],
        "sizes": [{"name": name, "model": entry.kind, **entry.values} for name, entry in named().items()],
        "strategies": strategies,
        "clusters": ["here", "testbed", *(name if name == "cpu" else f"NxM-{name}" for name in kinds)],
        "devices": list(catalogue("devices")),
        "links": list(catalogue("links")),
    }


def facts_of(name: str) -> dict[str, Any] | None:
    """The facts of one name; None if nothing bears it."""
    if name in MODELS:
        return {"model": name, "what": _first(MODELS[name]), "fields": _fields(MODELS[name])}
    if name in named():
        entry = named()[name]
        said = {"source": entry.source, "date": entry.date}
        return {"size": name, "model": entry.kind, **dataclasses.asdict(entry.spec()), **said}
    if name in GARDEN:
        return _strategy(GARDEN[name])
    for table in ("devices", "links"):
        if name in catalogue(table):
            return {table[:-1]: name, **catalogue(table)[name]}
    if name in CODES:
        return {"code": name, "fact": CODES[name], "page": f"docs/errors/{name}.md"}
    try:
        return _cluster(name)
    except Refused:
        return None


def plan_facts(plan: Plan) -> dict[str, Any]:
    """A plan's own facts: what it says, in its file's terms, and who sits where."""
    last = plan.mesh.ranks - 1
    corners = sorted({0, min(1, last), last})
    return {
        "plan_hash": plan.hash,
        "workload": plan.workload.table() if plan.workload else {},
        "cluster": {**cluster_table(plan.cluster), "ranks": plan.ranks},
        "mesh": dict(plan.mesh.axes),
        "ranks": [{"rank": r, **plan.mesh.coordinate(r)} for r in corners] if plan.mesh.axes else [],
        "strategies": [{"name": s.name, "promise": s.promise.value, **s.settings()} for s in plan.strategies],
    }


def run_facts(folder: Path) -> dict[str, Any]:
    """What a run folder tells: its summary, or as far as it came."""
    summary, predicted, metrics = folder / "summary.json", folder / "predicted.json", folder / "metrics.jsonl"
    if not predicted.is_file():
        law = "a run folder holds plan.toml, predicted.json, metrics.jsonl, checkpoints/ and summary.json"
        what, cure = f"{str(folder)!r} is no run folder", "the folder that train -o named"
        raise Refused(Fault("P108", what, law=law, cure=cure, at="partita show"))
    if summary.is_file():
        return _parsed(summary)
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    steps = [row for row in map(_line, lines) if "step" in row]
    last = steps[-1] if steps else {}
    came = {"finished": False, "steps": last.get("step", 0), "last": last}
    return {"run_dir": str(folder), **came, "predicted": _parsed(predicted)}


def run_timeline(folder: Path) -> dict[int, list[list[Any]]]:
    """Rank -> [name, phase, start, end] of the last step a run left behind."""
    path = folder / "timeline.json"
    return {int(rank): marks for rank, marks in _parsed(path).items()} if path.is_file() else {}


def _line(text: str) -> dict[str, Any]:
    try:
        return plain.loads(text)
    except ValueError:  # the last line of a run that was killed while writing it
        return {}


def _parsed(path: Path) -> dict[str, Any]:
    try:
        got = plain.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what, law, cure = f"{str(path)!r} cannot be read", "partita wrote it as JSON", "another run folder"
        raise Refused(Fault("P109", what, str(error), law, cure, "partita show")) from None
    return got if isinstance(got, dict) else {}


def _strategy(kind: type[Strategy]) -> dict[str, Any]:
    module = inspect.getmodule(kind)
    return {
        "strategy": kind.name,
        "what": _first(kind),
        "place": kind.place.name.lower(),
        "promise": kind.promise.value,
        "fields": _fields(kind),
        "about": inspect.getdoc(module) or "",
    }


def _cluster(name: str) -> dict[str, Any]:
    cluster = cluster_of(name)
    numbers = [{"number": key, "value": n.value, "source": n.cited} for key, n in sorted(cluster.numbers.items())]
    shape = {"nodes": cluster.nodes, "per_node": cluster.per_node, "devices": cluster.devices}
    return {"cluster": name, **shape, "backend": cluster.backend, "numbers": numbers, "notes": list(cluster.notes)}


def _first(kind: type) -> str:
    return (inspect.getdoc(kind) or "").split("\n", 1)[0]


def _fields(kind: Any) -> list[dict[str, Any]]:
    rows = []
    for f in dataclasses.fields(kind):
        default = "(needed)" if f.default is dataclasses.MISSING else "(none)" if f.default is None else f.default
        rows.append({"field": f.name, "type": str(getattr(f.type, "__name__", f.type)), "default": default})
    return rows
