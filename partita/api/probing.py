"""probe: measures this machine."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partita.cluster import cluster_of
from partita.runtime.launch import cache_folder
from partita.runtime.probe import probe as measure


@dataclass(frozen=True)
class Probe:
    """What a probe wrote, and how far its own held-out measurements are from it."""

    path: Path
    residuals: dict[str, float]
    notes: tuple[str, ...]

    def json(self) -> dict[str, Any]:
        return {"path": str(self.path), "residuals": self.residuals, "notes": list(self.notes)}


def probe(*, out: str | Path | None = None, quick: bool = False) -> Probe:
    """Measure this machine and keep what was measured in the user's cache folder, or in `out`."""
    lines: list[str] = []
    path = measure(cache_folder(), quick=quick, out=Path(out) if out else None, say=lines.append)
    return Probe(path, dict(residuals_of(path)), tuple(lines[-2:]))


def residuals_of(path: Path) -> Mapping[str, float]:
    """Median held-out error by class, as a probe file keeps it."""
    measured = cluster_of(str(path), folder=path.parent).measured
    return measured.residuals if measured else {}
