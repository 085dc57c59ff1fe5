"""This machine: its fingerprint, and where its probe file lies."""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def machine() -> dict[str, Any]:
    """What a probe file is keyed by: processor, cores, memory, torch."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    family = [line.split(":", 1)[1].strip() for line in lines if line.startswith(("cpu family", "model\t", "stepping"))][:3]
    return {"cpu": " / ".join([model, *family]), "cores": cores(), "torch": importlib.metadata.version("torch")}


def fingerprint() -> str:
    """Twelve hex digits that name this machine and its torch."""
    return hashlib.sha256(repr(sorted(machine().items())).encode()).hexdigest()[:12]


def probe_path(folder: Path) -> Path:
    """Where the probe file of this machine lives inside the cache folder."""
    return folder / f"probe-{fingerprint()}.toml"
