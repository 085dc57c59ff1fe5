"""Writes a benchmark's result: what was measured, against which target, at which commit, on which machine.

Every figure in the README and the docs comes from such a file (`scripts/figures`).
"""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """The machine, without a name that would tell where it stands."""
    names = (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    memory = next((int(line.split()[1]) << 10 for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"cpu": next(names, platform.machine()), "cores": os.cpu_count(), "memory_bytes": memory, **versions}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def commit() -> str:
    """Short hash of the commit, with a + if the tree differs from it."""
    here = Path(__file__).parent
    run = lambda *args: subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=False).stdout.strip()
    changed = run("status", "--porcelain", "--", "../partita")
    return run("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def row(what: str, target: str, measured: object, *, held: bool) -> dict[str, Any]:
    """One measured number beside its target."""
    return {"what": what, "target": target, "measured": measured, "held": held}


def write(claim_file: str, rows: list[dict[str, Any]], **more: Any) -> int:
    """Write results/result.json beside a claim's main.py and print the rows.

    Args:
        claim_file: `__file__` of the claim's main.py.
        rows: Each with `what`, `measured`, and `target` and `held` (see `row`) where it is judged.

    Returns:
        The exit code: 0 when every row held.
    """
    folder = Path(claim_file).parent / "results"
    folder.mkdir(exist_ok=True)
    result = {
        "claim": Path(claim_file).parent.name,
        "date": date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "load": os.getloadavg(),
        "rows": rows,
        **more,
    }
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    judged = [r for r in rows if "held" in r]
    for r in judged:
        print(f"{'held' if r['held'] else 'MISSED':<7} {r['what']}: {r['measured']} (target {r['target']})")
    return 0 if all(r["held"] for r in judged) else 1


if __name__ == "__main__":
    sys.exit("run a claim's main.py")
