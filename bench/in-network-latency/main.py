"""A sum of eight numbers in the kernel against a UDP process in C and against gloo's all-reduce, on the hosts of one testbed.

Workers of the switch are in C, so that what is compared are data planes and not Python; the same in Python stands beside it.
"""

import multiprocessing as mp
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import row, write

from partita.cluster import Testbed
from partita.mesh import Mesh
from partita.runtime.ranks import run_ranks
from partita.runtime.switch import Client, opened
from partita.runtime.testbed import Network
from partita.runtime.testbed.hosts import SWITCH

HERE = Path(__file__).parent
ROUNDS, REPEATS = 3000, 5
TARGETS = {2: 0.65, 4: 0.65, 8: 0.75}  # of the UDP process
GLOO = 0.1  # of gloo's all-reduce


def built(folder: Path) -> dict[str, str]:
    """Path of each compiled program."""
    for name in ("worker", "server"):
        subprocess.run(["cc", "-O2", "-o", folder / name, HERE / f"{name}.c"], check=True)
    return {name: str(folder / name) for name in ("worker", "server")}


def bed(workers: int) -> Testbed:
    return Testbed.of(hosts=workers, rate="100 Gbit/s")


def raced(network: Network, worker: str, workers: int, port: int, cookie: int) -> float:
    """Median microseconds of the slowest worker."""
    words = [[worker, str(w), str(workers), str(ROUNDS), SWITCH, str(port), str(cookie)] for w in range(workers)]
    ran = [
        host.inside(lambda some=some: subprocess.Popen(some, stdout=subprocess.PIPE, text=True))
        for host, some in zip(network.hosts, words, strict=True)
    ]
    told = [one.communicate(timeout=120)[0].split() for one in ran]
    assert all(one.returncode == 0 for one in ran), told
    assert all(t[4] == "0" for t in told), told
    return max(float(t[0]) for t in told)


def kernel(programs: dict[str, str], workers: int) -> float:
    network = Network(bed(workers))
    try:
        with opened("xdp", network, workers) as switch:
            assert switch.plane == "xdp", switch.note
            return raced(network, programs["worker"], workers, switch.address.port, switch.address.cookie)
    finally:
        network.close()


def process(programs: dict[str, str], workers: int) -> float:
    network = Network(bed(workers))
    words = [programs["server"], str(workers), SWITCH]
    server = network.switch.inside(lambda: subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        return raced(network, programs["worker"], workers, 9999, 0)
    finally:
        server.kill()
        server.communicate()
        network.close()


def gloo(programs: dict[str, str], workers: int) -> float:
    def work(net) -> float:
        x, took = torch.ones(8, dtype=torch.int32), []
        for _ in range(max(50, ROUNDS // 10)):
            began = time.perf_counter()
            net.all_reduce(x, "dp")
            took.append(time.perf_counter() - began)
        return 1e6 * median(took)

    return max(run_ranks(Mesh.of({"dp": workers}), work, cluster=bed(workers)))


def in_python(plane: str, workers: int) -> float:
    network = Network(bed(workers))
    context = mp.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    with opened(plane, network, workers) as switch:

        def work(w: int) -> None:
            network.enter(w, workers)
            client, took = Client(switch.address, 0, w, workers), []
            for _ in range(ROUNDS // 5):
                began = time.perf_counter()
                client.all_reduce_small(np.ones(8, np.int32))
                took.append(time.perf_counter() - began)
            theirs.send(1e6 * median(took))

        children = [context.Process(target=work, args=(w,)) for w in range(workers)]
        for child in children:
            child.start()
        found = [mine.recv() for _ in children]
        for child in children:
            child.join()
    network.close()
    return max(found)


def main() -> int:
    contestants = {
        "xdp": kernel, "udp": process, "gloo": gloo,
        "xdp, workers in Python": lambda _, workers: in_python("xdp", workers),
        "udp, all in Python": lambda _, workers: in_python("udp", workers),
    }  # fmt: skip
    folder = Path(tempfile.mkdtemp())
    try:
        programs = built(folder)
        found = {
            workers: [{name: call(programs, workers) for name, call in contestants.items()} for _ in range(REPEATS)]
            for workers in TARGETS
        }
    finally:
        shutil.rmtree(folder)
    rows = []
    for workers, runs in found.items():
        for peer, target in (("udp", TARGETS[workers]), ("gloo", GLOO)):
            ratio = median(run["xdp"] / run[peer] for run in runs)
            rows.append(
                row(
                    f"{workers} workers: XDP / {peer}, median round trip", f"<= {target}", round(ratio, 3), held=ratio <= target
                )
            )
        for name in contestants:
            each = sorted(run[name] for run in runs)
            told = f"{median(each):.1f} ({each[0]:.1f} to {each[-1]:.1f})"
            rows.append(
                {"what": f"{workers} workers: {name} (us, median of medians, least and most)", "target": "", "measured": told}
            )
    return write(__file__, rows, runs=found)


if __name__ == "__main__":
    sys.exit(main())
