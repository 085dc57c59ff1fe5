"""From what a user writes to a cluster: a name of the catalogue, `here`, `testbed` with its settings, or a path."""

import os
from dataclasses import replace
from pathlib import Path

from partita.cluster.catalogue import catalogue, named, numbers_in
from partita.cluster.machine import cores, probe_path
from partita.cluster.parts import Cluster, Number
from partita.cluster.reading import from_file
from partita.cluster.testbed import Testbed, Where


def cluster_of(name: Where, *, folder: Path | None = None, probe_dir: Path | None = None, ranks: int | None = None) -> Cluster:
    """The cluster a plan names.

    Args:
        name: Catalogue name, ``NxM-DEVICE``, ``here``, ``testbed`` or a `Testbed`, or the path of a cluster file.
        folder: What a relative path is relative to; None means the working directory.
        probe_dir: The user's cache folder, where probe files lie; None means no probe is looked for.
        ranks: How many are to be spread over the hosts of a testbed; None means one a core.

    Raises:
        Refused: With every fault at once.
    """
    if name == "here":
        return _here(probe_dir)
    if name == Testbed.name:
        name = Testbed()
    if isinstance(name, Testbed):
        return _testbed(name, _here(probe_dir), ranks)
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


def _testbed(bed: Testbed, here: Cluster, ranks: int | None) -> Cluster:
    """This machine's cores and memory shared out among hosts, and their links as slow as was asked.

    What the network slows down, the cores are free of: a link that lets through a tenth of what the loopback does takes a tenth
    of the loopback's toll on what is computed beside it. gloo asks before it sends, so a step takes twice the way of a frame.
    """
    each = bed.per_host(ranks or max(cores(), bed.hosts))
    link = numbers_in(catalogue("links")["veth"], "links.network.")
    asked = f"{bed}, which each host's ranks share"
    toll = min(1.0, bed.rate / here.link("node").bandwidth)
    numbers = {
        **here.numbers,
        **link,
        "device.memory": Number(here.value("device.memory") / bed.hosts, "this machine's, shared out among the hosts"),
        "links.network.bandwidth": Number(bed.rate / each, asked),
        "links.network.latency": Number(
            link["links.network.latency"].value + 2 * (bed.delay or 0.0), f"catalogue links.veth; {asked}"
        ),
    }
    for key in ("interference.compute", "interference.communication"):
        numbers[key] = Number(here.value(key) * toll, f"{toll:.3g} of the loopback's: {here.source(key)}")
    return replace(here, name=bed, nodes=bed.hosts, per_node=each, cores=cores() / bed.hosts, numbers=numbers, open_ended=True)
