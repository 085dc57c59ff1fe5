"""The verbs: short walks to the rooms below.

plan · estimate · train · prove · probe      the same spelling on the command line
load · capture · spawn · session · report · check_strategy
"""

from partita.api.planning import Estimate, estimate, load, plan, probe
from partita.api.proving import check_strategy, prove
from partita.api.reporting import report
from partita.api.running import Run, train
from partita.api.sessions import session, spawn
from partita.runtime.capture import capture

__all__ = [
    "Estimate",
    "Run",
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
