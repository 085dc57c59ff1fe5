"""From what a user writes to a cluster: a name of the catalogue, `here`, or a path."""

import os
from dataclasses import replace
from pathlib import Path

from partita.cluster.catalogue import named
from partita.cluster.machine import cores, probe_path
from partita.cluster.parts import Cluster, Number
from partita.cluster.reading import from_file


def cluster_of(name: str, *, folder: Path | None = None, probe_dir: Path | None = None) -> Cluster:
    """The cluster a plan names.

    Args:
        name: Catalogue name, ``NxM-DEVICE``, ``here``, or the path of a cluster file.
        folder: What a relative path is relative to; None means the working directory.
        probe_dir: The user's cache folder, where probe files lie; None means no probe is looked for.

    Raises:
        Refused: With every fault at once.
    """
    if name == "here":
        return _here(probe_dir)
    if name.endswith(".toml") or "/" in name:
        return replace(from_file((folder or Path()) / name), name=name)
    return named(name)


def _here(probe_dir: Path | None) -> Cluster:
    if probe_dir and probe_path(probe_dir).is_file():
        return replace(from_file(probe_path(probe_dir)), name="here", open_ended=True)
    base, count = named("cpu"), cores()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    numbers = {**base.numbers, "device.memory": Number(float(memory), "physical memory of this machine")}
    note = "no probe of this machine: catalogue entry cpu with a wide band; `partita probe` measures it"
    return replace(base, name="here", per_node=count, numbers=numbers, notes=(note,), open_ended=True)
