"""Reads a plan file: every fault at once, each with its place in the file."""

import copy
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from partita.cluster import Testbed, Where
from partita.cluster.testbed import KEYS
from partita.errors import Fault, Refused, refuse
from partita.mesh import Mesh
from partita.plans.catalogue import named
from partita.plans.fields import COUNT, kind_of, nearest, read, unknown_keys
from partita.plans.laws import Parts, plan_faults
from partita.plans.overriding import override
from partita.plans.plan import FORMAT, Plan, absolute_cluster, devices_of, is_path, size_faults
from partita.plans.subjects import Read, model_names, read_table
from partita.strategy import Strategy, TextFile
from partita.workload import MODELS, Workload

Garden = Mapping[str, type[Strategy]]
LAW = "a plan is a TOML file in UTF-8"
TABLES = ("partita", "workload", "cluster", "mesh", "strategy")


@dataclass
class Found:
    """What was found in a file so far."""

    name: str
    folder: Path
    overridden: Mapping[str, str] = field(default_factory=dict)  # place -> key of the --set that wrote it
    faults: list[Fault] = field(default_factory=list)

    def add(self, *faults: Fault) -> None:
        self.faults += faults

    def stop(self) -> None:
        """Refuse if anything was wrong; each fault names the file, or the --set that brought it."""
        refuse([self.placed(fault) for fault in self.faults])

    def placed(self, fault: Fault) -> Fault:
        if fault.at in self.overridden:
            return replace(fault, at=f"--set {self.overridden[fault.at]}")
        return fault if fault.at.startswith("--set ") else fault.located(self.name)

    def bad(self) -> frozenset[str]:
        return frozenset(f.at for f in self.faults)


def load(path: str | Path, overrides: Mapping[str, str] | None = None, *, strategies: Garden) -> Plan:
    """The plan of a file.

    Args:
        path: A TOML file; relative paths in it start at its folder.
        overrides: Dotted key -> TOML value, as --set gives them; a plain key belongs to [workload].
        strategies: Name -> class of every strategy there is.

    Raises:
        Refused: With every fault at once.
    """
    path = Path(path)
    return load_text(_text(path), overrides, strategies=strategies, name=path.name, folder=path.parent.resolve(), path=path)


def load_text(
    text: str,
    overrides: Mapping[str, str] | None = None,
    *,
    strategies: Garden,
    name: str = "plan.toml",
    folder: Path | None = None,
    path: Path | None = None,
) -> Plan:
    """The plan of a TOML text; `folder` is where its relative paths start."""
    found = Found(name, (folder or Path.cwd()).resolve())
    table = _table(text, overrides or {}, found)
    work = _workload(table, found)
    cluster, ranks = _cluster(table, found)
    mesh = _mesh(table, found)
    chosen = _strategies(table, strategies, found)
    devices, faults = devices_of(cluster, found.folder) if "cluster.name" not in found.bad() else (None, [])
    found.add(*faults)
    count = ranks or devices or Mesh(mesh).ranks
    found.add(*plan_faults(Parts(work.workload, cluster, devices, count, mesh, chosen, found.bad())))
    found.stop()
    return Plan(work.workload, cluster, count, dict(mesh), chosen, path=path)


def read_workload(text: str, overrides: Mapping[str, str] | None = None) -> Workload:
    """A workload by name: a catalogue model, `hf:…`, `python:…`, or the path of a TOML file with a [workload].

    Raises:
        Refused: With every fault at once.
    """
    is_name = text in MODELS or text in named() or text.startswith(("hf:", "python:"))
    path = Path(text)
    if not is_name and not path.exists() and not is_path(text):
        cure = nearest(text, [*MODELS, *named()])
        cure = cure if cure.endswith("?") else f"{model_names()}, or the path of a TOML file with [workload]"
        law = "a workload is named, or described by a TOML file"
        raise Refused(Fault("P107", f"unknown workload {text!r}", law=law, cure=cure, at="WORKLOAD"))
    found = Found("WORKLOAD" if is_name else path.name, Path.cwd() if is_name else path.parent.resolve())
    table = {"workload": {"model": text}} if is_name else _parse(_text(path), found)
    work = _workload(_overridden(table, overrides or {}, found), found)
    found.stop()
    return work.workload


def _text(path: Path) -> str:
    """The text of a plan file."""
    place = str(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        here = [p.name for p in path.parent.iterdir() if p.suffix == ".toml"] if path.parent.is_dir() else []
        cure = nearest(path.name, here) if here else "the path of a TOML file"
        raise Refused(Fault("P108", f"plan {place!r} does not exist", law=LAW, cure=cure, at=place)) from None
    except IsADirectoryError:
        inside = sorted(p.name for p in path.glob("*.toml"))
        cure = " or ".join(str(path / p) for p in inside[:6]) or "the path of a TOML file"
        raise Refused(Fault("P109", f"plan {place!r} is a folder", law=LAW, cure=cure, at=place)) from None
    except OSError as error:
        have, cure = str(error.strerror), "a TOML file this user may read"
        raise Refused(Fault("P109", f"plan {place!r} cannot be read", have, LAW, cure, place)) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        have, law = f"byte {data[error.start]:#04x} at {error.start}", "TOML is UTF-8 text"
        raise Refused(Fault("P109", f"plan {place!r} is not UTF-8", have, law, "save it as UTF-8", place)) from None


def _parse(text: str, found: Found) -> dict[str, Any]:
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        cure = "key = value, with quotes around text"
        raise Refused(Fault("P109", f"{found.name!r} is no TOML", str(error), LAW, cure, found.name)) from None
    if not table:
        cure = f'partita = {FORMAT}, then [workload] with model = "gpt"'
        raise Refused(Fault("P110", f"{found.name!r} is empty", "no tables", LAW, cure, found.name))
    return table


def _overridden(table: dict[str, Any], overrides: Mapping[str, str], found: Found) -> dict[str, Any]:
    table, places, faults = override(copy.deepcopy(table), overrides)
    found.overridden = places
    found.add(*faults)
    return table


def _table(text: str, overrides: Mapping[str, str], found: Found) -> dict[str, Any]:
    table = _overridden(_parse(text, found), overrides, found)
    found.add(*unknown_keys(table, TABLES, ""))
    version = table.get("partita", FORMAT)
    if type(version) is not int:
        what, law = f"partita = {version!r} is not an integer", "it is the number of the format"
        found.add(Fault("P102", what, kind_of(version), law, f"partita = {FORMAT}", "partita"))
    elif version != FORMAT:
        law = f"this version reads plan files of format {FORMAT}"
        found.add(Fault("P112", f"format {version} is unknown", f"partita = {version}", law, f"partita = {FORMAT}", "partita"))
    for key, kind in (("workload", dict), ("cluster", dict), ("mesh", dict), ("strategy", list)):
        value = table.get(key, kind())
        if not isinstance(value, kind) or (kind is list and not all(isinstance(v, dict) for v in value)):
            shape = f"[[{key}]]" if kind is list else f"[{key}]"
            law = f"{key} is written as {shape}"
            found.add(Fault("P102", f"{key} = {value!r} is no table", kind_of(value), law, shape, key))
            table[key] = kind()
    return table


def _workload(table: Mapping[str, Any], found: Found) -> Read:
    work = table.get("workload", {})
    if not isinstance(work, dict):
        work = {}
    got = read_table(work, found.folder)
    found.add(*got.faults)
    return got


def _cluster(table: Mapping[str, Any], found: Found) -> tuple[Where, int | None]:
    given = table.get("cluster", {})
    name, ranks = given.get("name", "here"), given.get("ranks")
    found.add(*unknown_keys(given, ("name", "ranks", *(KEYS if name == Testbed.name else ())), "cluster"))
    if not isinstance(name, str) or not name:
        cure = '"here", "testbed", "8x8-h100" or the path of a cluster file'
        what, law = f"name = {name!r} is not the name of a cluster", "a cluster is named by a string"
        found.add(Fault("P102", what, kind_of(name), law, cure, "cluster.name"))
        name = "here"
    if ranks is not None:
        faults = size_faults("ranks", ranks, "cluster.ranks")
        found.add(*faults)
        ranks = None if faults else ranks
    if name == Testbed.name:
        bed, faults = Testbed.read(given)
        found.add(*faults)
        return bed, ranks
    return absolute_cluster(name, found.folder), ranks


def _mesh(table: Mapping[str, Any], found: Found) -> tuple[tuple[str, int], ...]:
    mesh = []
    for axis, size in table.get("mesh", {}).items():
        faults = size_faults(axis, size, f"mesh.{axis}")
        found.add(*faults)
        mesh.append((axis, 1 if faults else size))
    return tuple(mesh)


def _strategies(table: Mapping[str, Any], garden: Garden, found: Found) -> tuple[Strategy, ...]:
    made = (_strategy(given, index, garden, found) for index, given in enumerate(table.get("strategy", [])))
    return tuple(s for s in made if s is not None)


def _strategy(given: Mapping[str, Any], index: int, garden: Garden, found: Found) -> Strategy | None:
    name = given.get("name")
    place = f"strategy[{index}].name"
    if not isinstance(name, str):
        code, what = ("P119", "a strategy has no name") if name is None else ("P102", f"name = {name!r} is not a string")
        found.add(Fault(code, what, law="a strategy is named after its file", cure=", ".join(sorted(garden)), at=place))
        return None
    try:
        kind = garden[name]
    except KeyError:
        law = "a strategy is named after its file, or found by entry point"
        close, names = nearest(name, garden), ", ".join(sorted(garden))
        cure = f"{close} There are: {names}" if close.endswith("?") else names
        found.add(Fault("P107", f"unknown strategy {name!r}", law=law, cure=cure, at=place))
        return None
    except Refused as refused:
        found.add(*(replace(f, at=place) for f in refused.faults))
        return None
    return _made(kind, {k: v for k, v in given.items() if k != "name"}, f"strategy.{name}", found)


def _made(kind: type[Strategy], given: Mapping[str, Any], at: str, found: Found) -> Strategy | None:
    """The strategy of a table's values."""
    hints = typing.get_type_hints(kind)
    own = {f.name: hints[f.name] for f in fields(kind)}
    values, faults = read(given, own, at, lambda _: COUNT)
    for name in (n for n, value in values.items() if own[n] is TextFile and isinstance(value, str) and value):
        values[name], wrong = text_file(values[name], found.folder, f"{at}.{name}")
        faults += wrong
    faults += unknown_keys(given, [*own, "name"], at)
    for f in fields(kind):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in given:
            what, cure = f"{kind.name} needs {f.name}", f"{f.name} = …"
            faults.append(Fault("P119", what, law="it has no default", cure=cure, at=f"{at}.{f.name}"))
    if not faults:
        try:
            return kind(**values)
        except Refused as refused:
            faults = [replace(f, at=f"{at}.{f.at}") for f in refused.faults]
        except ValueError as error:
            faults = [Fault("P112", f"{kind.name} takes no such setting", have=str(error), at=at)]
    found.add(*faults)
    return None


def text_file(value: str, folder: Path, at: str) -> tuple[TextFile | None, list[Fault]]:
    """A text that a plan holds itself, in lines, or names by its path; a relative path stays in the plan's folder."""
    if "\n" in value:
        return TextFile(value), []
    path = Path(value).expanduser()
    where = (folder / path).resolve()
    if not path.is_absolute() and not where.is_relative_to(folder):
        law = "a relative path starts at the folder of the plan file and stays in it, so that both can move together"
        what = f"path {value!r} leaves the folder of the plan"
        return None, [Fault("P112", what, f"{where}, folder {folder}", law, f"a file in {folder}, or an absolute path", at)]
    try:
        return TextFile.read(where), []
    except Refused as refused:
        return None, [replace(f, at=at) for f in refused.faults]
