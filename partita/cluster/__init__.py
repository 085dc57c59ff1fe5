"""A cluster: devices and links as numbers, each with its source and date.

8x8-h100   8 nodes of 8 devices of catalogue entry `h100`
cpu        a general machine, a rank per core
here       this machine, as its probe file found it
testbed    several hosts on this machine, their links as slow as one asks
PATH       a cluster file (`reading.py`)
"""

from partita.cluster.catalogue import catalogue, flatten, named
from partita.cluster.machine import cores, fingerprint, machine, probe_path
from partita.cluster.naming import cluster_of
from partita.cluster.parts import Cluster, Curve, Link, Measured, Number, Product
from partita.cluster.reading import from_file
from partita.cluster.testbed import Testbed, Where

__all__ = [
    "Cluster", "Curve", "Link", "Measured", "Number", "Product", "Testbed", "Where",
    "catalogue", "cluster_of", "cores", "fingerprint", "flatten", "from_file", "machine", "named", "probe_path",
]  # fmt: skip
