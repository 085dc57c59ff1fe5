"""Several hosts on one machine: a network namespace each, behind links as slow as one asks.

    host 0 (ranks)         host 1 (ranks)
      eth0  tbf              eth0  tbf           each end of a link sends at its rate
        │ veth                 │ veth            with a delay: a TAP at each end, and a thread of the command that holds frames
      s0  tbf  ── bridge ──  s1  tbf             the switch's namespace

The namespaces have no names and are pinned nowhere: they are held by open descriptors of the command and its ranks, and with
the last of those processes the kernel takes away the namespaces, links and limits. Nothing is left behind by a kill, and there
is nothing to clean up.
"""

from partita.runtime.testbed.hosts import Network, faults, note, settled
from partita.runtime.testbed.namespaces import Namespace

__all__ = ["Namespace", "Network", "faults", "note", "settled"]
