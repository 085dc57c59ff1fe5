"""The hosts of a testbed and the switch between them: made, entered by ranks, and gone with the last process."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from partita.cluster import Testbed, Where
from partita.errors import Fault, RunFailed, refuse
from partita.runtime.launch import listen_on, ranks_from_environment
from partita.runtime.testbed.namespaces import Namespace, capable
from partita.runtime.testbed.relay import Relay, tap

INTERFACE = "eth0"  # of every host
SUBNET = "10.9.0"  # seen inside the namespaces only
SWITCH = f"{SUBNET}.254"
BURST = 4e-3  # seconds of the rate that tbf lets pass at once; with less, gloo's bursts lose up to nine tenths of the rate
LEAST_BURST = 3028  # bytes: two frames
QUEUE = "50ms"  # tbf drops what would wait longer than that


class Network:
    """A testbed that is up.

    Args:
        bed: What it is like.

    Raises:
        RunFailed: If the system refuses a part of it.
    """

    def __init__(self, bed: Testbed) -> None:
        self.bed, self.relay = bed, None
        self._taps: list[tuple[int, int]] = []
        self._spaces: list[Namespace] = []
        try:
            self.switch = self._space()
            self.hosts = [self._space() for _ in range(bed.hosts)]
            self._wire()
        except (OSError, subprocess.SubprocessError) as error:
            self.close()
            raise RunFailed(f"the testbed cannot be made: {_said(error)}") from None

    def enter(self, rank: int, ranks: int) -> None:
        """Move this freshly forked rank onto its host, and let go of all else."""
        self.hosts[self.bed.host(rank, ranks)].enter()
        listen_on(INTERFACE)
        self._let_go()

    def close(self) -> None:
        """Take it down; ranks that still live keep their own host."""
        if self.relay:
            self.relay.stop()
        self._let_go()

    def _let_go(self) -> None:
        for space in self._spaces:
            space.close()
        for descriptor in (d for pair in self._taps for d in pair):
            os.close(descriptor)
        self._spaces, self._taps = [], []

    def _space(self) -> Namespace:
        self._spaces.append(Namespace())
        return self._spaces[-1]

    def _wire(self) -> None:
        bridge = [f"addr add {SWITCH}/24 brd + dev br0", "link set br0 up"]
        self.switch.inside(lambda: _ip("link set lo up", "link add name br0 type bridge", *bridge))
        for i, host in enumerate(self.hosts):
            self._link(i, host)
            port = f"s{i}"
            mine = [
                f"link set {INTERFACE} address {mac(0, i)} addrgenmode none",
                f"addr add {address(i)}/24 brd + dev {INTERFACE}",
                f"link set {INTERFACE} up",
            ]
            ends = [f"link set {port} address {mac(1, i)} addrgenmode none master br0 up"]
            host.inside(lambda mine=mine: _ip("link set lo up", *mine))
            self.switch.inside(lambda ends=ends: _ip(*ends))
            host.inside(lambda: self._limit(INTERFACE))
            self.switch.inside(lambda port=port: self._limit(port))
        if self._taps:
            self.relay = Relay(self._taps, (self.bed.delay or 0.0) / 2)  # a frame crosses two links
            self.relay.start()

    def _link(self, i: int, host: Namespace) -> None:
        """Between a host and its port of the switch."""
        if self.bed.delay:
            mine, ports = host.inside(lambda: tap(INTERFACE)), self.switch.inside(lambda: tap(f"s{i}"))
            self._taps.append((mine, ports))
            return
        self.switch.inside(lambda: _ip(f"link add name s{i} type veth peer name {INTERFACE} netns {host.path}"))

    def _limit(self, interface: str) -> None:
        rate = self.bed.rate
        burst = max(LEAST_BURST, round(rate * BURST))
        _call("tc", "qdisc", "replace", "dev", interface, "root", "tbf",
              "rate", f"{round(8 * rate)}bit", "burst", f"{burst}b", "latency", QUEUE)  # fmt: skip


def address(host: int) -> str:
    """Of a host, inside the testbed."""
    return f"{SUBNET}.{host + 1}"


def mac(end: int, host: int) -> str:
    """Of an end of a host's link: 0 the host's, 1 the switch's."""
    return f"02:00:00:00:{end:02x}:{host + 1:02x}"


# ---- whether there can be one


def missing() -> str | None:
    """Why this process cannot make hosts; None if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if not capable():
        return "this process is not root: it may make neither network namespaces nor links"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no program {tool!r} (Debian package iproute2)"
    try:
        Namespace().close()
    except OSError as error:
        return f"the system gives no network namespace: {error.strerror}"
    return None


def faults(cluster: Where) -> list[Fault]:
    """Why ranks cannot run on this testbed; nothing for any other cluster."""
    if not isinstance(cluster, Testbed):
        return []
    if ranks_from_environment() is not None:
        law = "a testbed forks its ranks into its hosts"
        return [Fault("P115", "ranks of torchrun cannot enter a testbed", "", law, "partita train by itself", "cluster.name")]
    why = missing()
    if why is None or cluster.fallback:
        return []
    law = "a host of a testbed is a network namespace, which root alone may make"
    cure = 'as root; or fallback = "loopback" in [cluster]: all ranks on the loopback, as fast as it is; or name = "here"'
    return [Fault("P115", f"no {cluster} here", why, law, cure, "cluster.name")]


def note(cluster: Where) -> str | None:
    """What a reader must know of where the ranks ran: that a testbed was not to be had."""
    why = missing() if isinstance(cluster, Testbed) else None
    return f"all ranks were on the loopback, as fast as it is: {why}" if why else None


@contextmanager
def settled(cluster: Where) -> Iterator[Network | None]:
    """The testbed that forked ranks are to live on, up; None where they live on the loopback.

    Raises:
        Refused: If there can be no such testbed and no fallback was asked for.
    """
    refuse(faults(cluster))
    if not isinstance(cluster, Testbed) or missing():
        yield None
        return
    with contextlib.closing(Network(cluster)) as network:
        yield network


# ---- programs


def _ip(*commands: str) -> None:
    _call("ip", "-batch", "-", told="".join(f"{command}\n" for command in commands))


def _call(*words: str, told: str = "") -> None:
    subprocess.run(words, input=told, text=True, capture_output=True, check=True)


def _said(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"
    return str(error)
