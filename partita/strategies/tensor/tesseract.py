"""Puts d copies of a q x q plane one behind the other: batch over depth and rows, every matrix once on each plane.

    activation    batch over tp_depth and tp_row, features over tp_col
    matrix        blocks as on one plane, the same on every one; gradients summed over tp_depth once a step
    d = 1         the plane alone, which is `summa`

Source: Wang et al. 2021, "Tesseract: Parallelize the Tensor Parallelism Efficiently", arXiv:2105.14500, section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.errors import Fault
from partita.mesh import Mesh
from partita.strategy import Case, Planar


@dataclass(frozen=True)
class Tesseract(Planar):
    """2.5D tensor parallelism.

    Args:
        row: The mesh axis along which the row of a rank varies.
        column: The mesh axis along which its column varies; as many columns as rows.
        depth: The mesh axis of the planes.

    Example:
        >>> Tesseract().axes
        ('tp_depth', 'tp_row', 'tp_col')
    """

    name: ClassVar[str] = "tesseract"

    depth: str = "tp_depth"

    @property
    def depths(self) -> tuple[str, ...]:
        return (self.depth,)

    def suits(self, mesh: Mesh) -> bool:
        """Squares, no deeper than they are wide."""
        return mesh.size(self.row) == mesh.size(self.column) >= mesh.size(self.depth)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"tp_depth": 2, "tp_row": 2, "tp_col": 2}, {}),
            Case({"tp_depth": 2, "tp_row": 2, "tp_col": 2}, {}, workload="llama"),
        )

    def _shape_faults(self, mesh: Mesh) -> list[Fault]:
        rows, columns = mesh.size(self.row), mesh.size(self.column)
        if rows == columns:
            return []
        ranks = rows * columns
        squares = [q for q in range(1, ranks + 1) if ranks % (q * q) == 0]
        cure = " or ".join(f"{self.row} = {q}, {self.column} = {q}, {self.depth} x {ranks // q**2}" for q in squares)
        return [
            Fault(
                "P104",
                f"{self._who} needs as many rows as columns",
                f"{self.row} = {rows}, {self.column} = {columns}",
                "its planes are squares of q x q ranks; a rectangle is for 'summa'",
                cure,
                f"mesh.{self.column}",
            )
        ]
