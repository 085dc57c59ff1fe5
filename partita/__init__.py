"""Plan, predict, run and prove any parallel training, from one description.

The front desk: every public name, resolved when first asked for, so that importing costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.api import capture, check_strategy, estimate, load, plan, probe, prove, report, session, spawn, train
    from partita.cluster import Cluster
    from partita.plans import Plan
    from partita.workload import Workload

__version__ = "0.1.0"

_ROOMS = {
    "Cluster": "partita.cluster",
    "Plan": "partita.plans",
    "Workload": "partita.workload",
    "capture": "partita.api",
    "check_strategy": "partita.api",
    "estimate": "partita.api",
    "load": "partita.api",
    "plan": "partita.api",
    "probe": "partita.api",
    "prove": "partita.api",
    "report": "partita.api",
    "session": "partita.api",
    "spawn": "partita.api",
    "train": "partita.api",
}

__all__ = [
    "Cluster",
    "Plan",
    "Workload",
    "capture",
    "check_strategy",
    "estimate",
    "load",
    "plan",
    "probe",
    "prove",
    "report",
    "session",
    "spawn",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return getattr(importlib.import_module(_ROOMS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
