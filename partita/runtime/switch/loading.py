"""Compiles the kernel's data plane at its first use and puts it on a testbed's ports, through libbpf; nothing is pinned.

The programs and maps live as long as this process holds them or a port carries them, and a port goes with its namespace.
"""

import ctypes
import ctypes.util
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sysconfig
from importlib import resources
from pathlib import Path
from typing import Any

from partita.runtime.launch import cache_folder
from partita.runtime.testbed import Network
from partita.runtime.testbed.hosts import INTERFACE, SUBNET

NATIVE = 1 << 2  # linux/if_link.h: XDP_FLAGS_DRV_MODE
COUNTS = ("sums", "copies", "late", "stale", "strangers")  # as in xdp.c
MOST_JOBS = 64


class NoPlane(Exception):
    """Why the kernel's data plane cannot be had here."""


def compiled(folder: Path | None = None) -> Path:
    """The object file of the program, in the user's cache.

    Raises:
        NoPlane: If it cannot be compiled.
    """
    source = (resources.files("partita.runtime.switch") / "xdp.c").read_text("utf-8")
    folder = folder or cache_folder()
    made = folder / f"switch-{hashlib.sha256(source.encode()).hexdigest()[:12]}.o"
    if made.is_file():
        return made
    if shutil.which("clang") is None:
        raise NoPlane("there is no program 'clang' to compile it (Debian package clang)")
    folder.mkdir(parents=True, exist_ok=True)
    fresh = made.with_suffix(f".{os.getpid()}")
    include = f"/usr/include/{sysconfig.get_config_var('MULTIARCH') or ''}"
    words = ["clang", "-O2", "-g", "-target", "bpf", f"-I{include}", "-x", "c", "-c", "-", "-o", str(fresh)]
    done = subprocess.run(words, input=source, text=True, capture_output=True, check=False)
    if done.returncode:
        raise NoPlane(f"clang does not compile it: {(done.stderr.strip().splitlines() or ['?'])[0]}")
    fresh.rename(made)
    return made


class Kernel:
    """The data plane, loaded and on every port of a testbed's switch.

    Args:
        network: The testbed.
        cookie, workers, jobs: As of any switch.

    Raises:
        NoPlane: If the system does not take it.
    """

    def __init__(self, network: Network, cookie: int, workers: int, jobs: int = 1) -> None:
        if network.bed.delay:
            raise NoPlane("a testbed with a delay has no veth pairs")
        if jobs > MOST_JOBS:
            raise NoPlane(f"{jobs} groups, and it has room for {MOST_JOBS}")
        self._bpf = _libbpf()
        self._object = self._bpf.bpf_object__open_file(str(compiled()).encode(), None)
        if not self._object:
            raise NoPlane("libbpf cannot read the compiled program")
        try:
            self._load(network, struct.pack("=III4s", cookie, workers, jobs, socket.inet_aton(f"{SUBNET}.255")))
        except NoPlane:
            self.close()
            raise

    def _load(self, network: Network, config: bytes) -> None:
        self._ok(self._bpf.bpf_object__load(self._object), "the kernel does not load the program")
        self._put("conf", 0, config)
        network.switch.inside(lambda: [self._port(i) for i in range(len(network.hosts))])
        for host in network.hosts:
            host.inside(lambda: self._attach("pass", INTERFACE))

    def _port(self, i: int) -> None:
        self._attach("add", f"s{i}")
        self._put("ports", i, struct.pack("=I", socket.if_nametoindex(f"s{i}")))  # read in the namespace of this thread

    def _attach(self, program: str, interface: str) -> None:
        found = self._bpf.bpf_object__find_program_by_name(self._object, program.encode())
        index = socket.if_nametoindex(interface)
        done = self._bpf.bpf_xdp_attach(index, self._bpf.bpf_program__fd(found), NATIVE, None)
        self._ok(done, f"no native XDP program on {interface}")

    def _put(self, name: str, key: int, value: bytes) -> None:
        done = self._bpf.bpf_map_update_elem(self._map(name), struct.pack("=I", key), value, 0)
        self._ok(done, f"map {name} takes no entry")

    def _map(self, name: str) -> int:
        return self._bpf.bpf_map__fd(self._bpf.bpf_object__find_map_by_name(self._object, name.encode()))

    def _ok(self, result: int, what: str) -> None:
        if result < 0:
            raise NoPlane(f"{what}: {os.strerror(-result)}")

    @property
    def counts(self) -> dict[str, int]:
        """What happened so far, by name."""
        found = {}
        for key, name in enumerate(COUNTS):
            value = ctypes.create_string_buffer(8)
            self._bpf.bpf_map_lookup_elem(self._map("counts"), struct.pack("=I", key), value)
            (found[name],) = struct.unpack("=Q", value.raw)
        return found

    def close(self) -> None:
        """Let go of it; ports keep their programs until they are gone."""
        if self._object:
            self._bpf.bpf_object__close(self._object)
            self._object = None


def _libbpf() -> Any:
    try:
        found = ctypes.CDLL("libbpf.so.1")
    except OSError:
        raise NoPlane("there is no libbpf.so.1 (Debian package libbpf1)") from None
    for name in ("bpf_object__open_file", "bpf_object__find_map_by_name", "bpf_object__find_program_by_name"):
        getattr(found, name).restype = ctypes.c_void_p
    pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    found.bpf_object__open_file.argtypes = [text, pointer]
    found.bpf_object__load.argtypes = found.bpf_object__close.argtypes = [pointer]
    found.bpf_object__find_map_by_name.argtypes = found.bpf_object__find_program_by_name.argtypes = [pointer, text]
    found.bpf_map__fd.argtypes = found.bpf_program__fd.argtypes = [pointer]
    found.bpf_xdp_attach.argtypes = [number, number, ctypes.c_uint32, pointer]
    found.bpf_map_update_elem.argtypes = [number, text, text, ctypes.c_uint64]
    found.bpf_map_lookup_elem.argtypes = [number, text, pointer]
    found.libbpf_set_print(None)
    return found
