"""Plan, predict, run and prove any parallel training, from one description.

The front desk: every public name, resolved when first asked for, so that importing costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partita.api.planning import estimate, load, plan
    from partita.api.probing import probe
    from partita.api.proving import check_strategy, prove
    from partita.api.reporting import report
    from partita.api.running import train
    from partita.api.sessions import session, spawn
    from partita.cluster import Cluster
    from partita.plans import Plan
    from partita.runtime.capture import capture
    from partita.workload import Workload

__version__ = "0.1.0"

_ROOMS = {
    "Cluster": "partita.cluster",
    "Plan": "partita.plans",
    "Workload": "partita.workload",
    "capture": "partita.runtime.capture",
    "check_strategy": "partita.api.proving",
    "estimate": "partita.api.planning",
    "load": "partita.api.planning",
    "plan": "partita.api.planning",
    "probe": "partita.api.probing",
    "prove": "partita.api.proving",
    "report": "partita.api.reporting",
    "session": "partita.api.sessions",
    "spawn": "partita.api.sessions",
    "train": "partita.api.running",
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
