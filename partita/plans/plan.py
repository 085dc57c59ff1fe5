"""The Plan: what is trained, where, over which mesh, split how."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from partita.cluster import Testbed, Where, cluster_of
from partita.errors import Fault, Refused, refuse
from partita.mesh import Mesh
from partita.plans.fields import kind_of
from partita.plans.laws import Parts, plan_faults
from partita.plans.subjects import absolute, complete, given_faults
from partita.plans.writing import toml
from partita.strategy import Strategy, microbatches
from partita.workload import Workload

FORMAT = 1


@dataclass(frozen=True, init=False)
class Plan:
    """One way to train one workload. Checked when made: a plan that exists is legal.

    Args:
        workload: What is trained; None where Python passes the model to the verb.
        cluster: Catalogue name, absolute path of a cluster file, "here", or a testbed.
        ranks: How many ranks; None means as many as the mesh has.
        mesh: Axis -> size, outermost (slowest link) first.
        strategies: Innermost first.
        accumulate: Microbatches a step is divided into on every data rank; None means the workload's own, or 1.
        path: The file it was read from.

    Raises:
        Refused: With every fault at once.

    Example:
        >>> Plan(ranks=1).mesh.ranks
        1
    """

    workload: Workload | None
    cluster: Where
    ranks: int
    mesh: Mesh
    strategies: tuple[Strategy, ...]
    accumulate: int
    path: Path | None = field(compare=False)

    def __init__(
        self,
        workload: Workload | None = None,
        cluster: Where = "here",
        ranks: int | None = None,
        mesh: Mesh | Mapping[str, int] | None = None,
        strategies: Sequence[Strategy] = (),
        accumulate: int | None = None,
        path: Path | None = None,
    ) -> None:
        pairs = mesh.axes if isinstance(mesh, Mesh) else tuple((mesh or {}).items())
        refuse([f.located("Plan") for f in _types(pairs, ranks, accumulate, strategies)])
        if workload:
            refuse([f.located("Plan") for f in given_faults(workload)])
            workload = absolute(complete(workload), Path.cwd())
            workload = workload if accumulate is None else replace(workload, accumulate=accumulate)
        values = {
            "workload": workload,
            "cluster": absolute_cluster(cluster, Path.cwd()),
            "ranks": Mesh(pairs).ranks if ranks is None else ranks,
            "mesh": Mesh(pairs),
            "strategies": tuple(strategies),
            "accumulate": workload.accumulate if workload else accumulate or 1,
            "path": path,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        devices, faults = devices_of(self.cluster, Path.cwd())
        parts = Parts(workload, self.cluster, devices, self.ranks, pairs, self.strategies, frozenset(f.at for f in faults))
        refuse([f.located("Plan") for f in (*faults, *plan_faults(parts))])

    def __hash__(self) -> int:
        return hash(self.hash)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on a data rank: rounds of accumulation times those of a pipeline."""
        return microbatches(self.strategies, self.accumulate)

    @property
    def parted(self) -> Workload | None:
        """The workload with its step divided into all its microbatches."""
        return replace(self.workload, accumulate=self.microbatches) if self.workload else None

    @property
    def hash(self) -> str:
        """16 hex digits that two plans share exactly when they say the same, however they are spelt."""
        said = {
            "workload": self.workload.table() if self.workload else {"accumulate": self.accumulate},
            "cluster": [cluster_table(self.cluster) if isinstance(self.cluster, Testbed) else self.cluster, self.ranks],
            "mesh": self.mesh.axes,
            "strategies": [[s.name, s.settings()] for s in self.strategies],
        }
        text = json.dumps(said, sort_keys=True, default=str, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_toml(self, folder: Path | None = None) -> str:
        """The plan file that reads back as this plan.

        Args:
            folder: Where the file will stand: paths are written relative to it, so that both can move together.
                None writes absolute paths.
        """
        table: dict[str, Any] = {"partita": FORMAT}
        if self.workload:
            own = self.workload.table()
            if own.get("master") is None and own["dtype"] in ("bfloat16", "float16"):
                own["master"] = own["dtype"]
            if own.get("data"):
                own["data"] = _shown(own["data"], folder)
            if own["model"].startswith("hf:"):
                own["model"] = f"hf:{_shown(own['model'][3:], folder)}"
            table["workload"] = own
        table["cluster"] = {**cluster_table(self.cluster, folder), "ranks": self.ranks}
        table["mesh"] = dict(self.mesh.axes)
        table["strategy"] = [{"name": s.name, **s.settings()} for s in self.strategies]
        return toml(table)


def is_path(cluster: Where) -> bool:
    """Whether a cluster's name is the path of a file."""
    return isinstance(cluster, str) and (cluster.endswith(".toml") or os.sep in cluster)


def absolute_cluster(cluster: Where, folder: Path) -> Where:
    """A cluster as a plan holds it: paths absolute, a testbed with its settings."""
    if cluster == Testbed.name:
        return Testbed()
    return str((folder / cluster).resolve()) if isinstance(cluster, str) and is_path(cluster) else cluster


def cluster_table(cluster: Where, folder: Path | None = None) -> dict[str, Any]:
    """What a plan file says of a cluster, but for its ranks."""
    if isinstance(cluster, Testbed):
        return {"name": cluster.name, **cluster.table()}
    return {"name": _shown(cluster, folder) if is_path(cluster) else cluster}


def devices_of(cluster: Where, folder: Path) -> tuple[int | None, list[Fault]]:
    """Devices of a cluster; None on this machine, where any number of ranks is legal."""
    if cluster == "here" or isinstance(cluster, Testbed):
        return None, []
    try:
        return cluster_of(cluster, folder=folder).devices, []
    except Refused as refused:
        own = "cluster.name"
        return None, [replace(f, at=own if f.at == own else f"{own} ({f.at})") for f in refused.faults]


def _types(pairs: tuple[tuple[Any, Any], ...], ranks: Any, accumulate: Any, strategies: Sequence[Any]) -> list[Fault]:
    """What no annotation stops in Python: wrong types, sizes below 1."""
    faults = [f for axis, size in pairs for f in size_faults(axis, size, f"mesh.{axis}")]
    for name, value in (("ranks", ranks), ("accumulate", accumulate)):
        if value is not None:
            faults += size_faults(name, value, name)
    law = "strategies are instances of Strategy, innermost first"
    for s in strategies:
        if not isinstance(s, Strategy):
            cure = f"{s.__name__}()" if isinstance(s, type) else "an instance of a Strategy"
            faults.append(Fault("P102", f"{s!r} is no strategy", kind_of(s), law, cure, "strategies"))
    return faults


def size_faults(name: str, value: Any, at: str) -> list[Fault]:
    """What is wrong with a size: no integer, or below 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        return [Fault("P102", f"{name} = {value!r} is not an integer", kind_of(value), "a size is an integer", "1 or more", at)]
    if not 1 <= value < 1 << 63:
        law = "a size is at least 1 and has 64 bits; an axis of size 1 moves nothing"
        return [Fault("P112", f"{name} = {value} is out of range", f"{name} = {value}", law, "1 or more", at)]
    return []


def _shown(path: str, folder: Path | None) -> str:
    return path if folder is None else Path(os.path.relpath(path, folder.resolve())).as_posix()
