"""Products of operands cut in blocks over a plane or a cube of ranks, with gradients; all talk goes through `net`."""

from partita.runtime.grid.cube import Cube, cube_ab
from partita.runtime.grid.lookup import lookup
from partita.runtime.grid.plane import Plane
from partita.runtime.grid.products import ab, abt, atb

__all__ = ["Cube", "Plane", "ab", "abt", "atb", "cube_ab", "lookup"]
