"""The Plan and its file: TOML in, TOML out, one hash; every fault is found before anything starts.  Pure, no torch."""

from partita.plans.catalogue import NAMED, Named, named
from partita.plans.fields import nearest
from partita.plans.hf import spec_of_hf_config
from partita.plans.plan import Plan, cluster_table
from partita.plans.reading import load, load_text, read_workload
from partita.plans.subjects import complete

__all__ = [
    "NAMED",
    "Named",
    "Plan",
    "cluster_table",
    "complete",
    "load",
    "load_text",
    "named",
    "nearest",
    "read_workload",
    "spec_of_hf_config",
]
