"""Starts ranks and collects what they return: forked gloo ranks on this machine, or the ranks torchrun made.

    run_ranks ── fork ──▶ rank 0..n-1        direct children, no other children; results come back as JSON over pipes
        │                    │
        └── watches ◀── notes in shared memory: a dead, stopped or stuck rank is named and everything ends

The same `work(net)` runs in both.
"""

import atexit
import datetime
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partita.cluster import Where
from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.runtime.forked import Forked, Progress, Task
from partita.runtime.launch import Launched, loopback, ranks_from_environment
from partita.runtime.net import Net, Switch
from partita.runtime.switch import opened
from partita.runtime.testbed import Network, settled

TWICE = 3.0  # seconds: a terminal's Ctrl-C reaches a rank from the terminal and once more from torchrun
TORCHRUN_TIMEOUT = datetime.timedelta(minutes=10)  # torchrun ends the others when a rank dies; this is for ranks that hang


def run_ranks(  # noqa: PLR0913 - the mesh, the work, and keywords
    mesh: Mesh,
    work: Task,
    *,
    folder: Path | None = None,
    quiet: float = 5.0,
    progress: Progress | None = None,
    alone: bool = False,
    cluster: Where = "here",
    switch: tuple[str, str] | None = None,
) -> list[Any]:
    """Run `work(net)` on every rank of the mesh and return what each returned, in rank order.

    Args:
        mesh: The ranks; under torchrun its size must be the number of ranks there are.
        work: Called once per rank; returns something JSON can hold.
        folder: Where ranks may leave large results (`net.folder`).
        quiet: Seconds without a sign of life before a rank that keeps the others waiting is given up.
        progress: Told of steps as they are done: their number and the last loss.
        alone: One rank's work; under torchrun every process does it by itself.
        cluster: Forked ranks are on this machine whatever it says, but on the hosts of a testbed.
        switch: The axis forked ranks reduce over through a switch, and the data plane asked for; None sets up none.

    Raises:
        Refused: If a rank refused the input.
        RankLost: If a rank died, stopped or hung; the others are ended.
        RunFailed: If a rank raised.
        KeyboardInterrupt: After Ctrl-C, unless the work heeds `net.control` and returns by itself.
    """
    launched = ranks_from_environment()
    if launched is None:
        with settled(cluster) as network, switched(switch, mesh, network) as given:

            def settle(rank: int) -> None:
                network.enter(rank, mesh.ranks) if network else loopback()

            return Forked(mesh, work, folder=folder, quiet=quiet, progress=progress, settle=settle, switch=given).run()
    if alone:
        return [work(Net(mesh, 0, folder=folder))]
    net = joined(mesh, launched, folder)
    with _signals(net):
        net.progress = progress if net.rank == 0 else None
        return net.gather(work(net))


@contextmanager
def switched(asked: tuple[str, str] | None, mesh: Mesh, network: Network | None) -> Iterator[Switch | None]:
    """The switch that ranks are given, up; each group of the axis has slots of its own."""
    if asked is None or mesh.size(asked[0]) == 1:
        yield None
        return
    axis, plane = asked
    with opened(plane, network, mesh.size(axis), len(list(mesh.groups(axis)))) as made:
        yield Switch(axis, made.address, made.note)


def joined(mesh: Mesh, launched: Launched, folder: Path | None = None) -> Net:
    """The network of a rank made by torchrun: NCCL and this rank's GPU where there are GPUs, else gloo."""
    if mesh.ranks != launched.ranks:
        raise Refused(
            Fault(
                "P118",
                f"the plan needs {mesh.ranks} ranks and torchrun started {launched.ranks}",
                have=" x ".join(f"{name} = {size}" for name, size in mesh.axes) or "one rank",
                law="every rank is one place of the mesh",
                cure=f"torchrun --nproc-per-node {mesh.ranks} ..., or a mesh of {launched.ranks}",
                at="ranks",
            )
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", launched.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if not dist.is_initialized():  # once a process: a second group would find the addresses of the first in torchrun's store
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TORCHRUN_TIMEOUT)
        atexit.register(_part)
    store = dist.distributed_c10d._get_default_store()
    return Net(mesh, launched.rank, device=device, folder=folder, store=store, excluded=frozenset({launched.port}))


def _part() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _signals(net: Net) -> Iterator[None]:
    """Under torchrun, Ctrl-C and its SIGTERM ask this rank to finish the step."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    asked = 0.0

    def ask(number: int, frame: Any) -> None:
        nonlocal asked
        again = net.control.interrupted and time.monotonic() - asked > TWICE
        if again or not net.control.listening:
            raise KeyboardInterrupt
        net.control.interrupted, asked = 1, asked or time.monotonic()

    kept = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not asked:  # else the same Ctrl-C may come once more, while what was asked for is being written
            for number, handler in kept.items():
                signal.signal(number, handler)
