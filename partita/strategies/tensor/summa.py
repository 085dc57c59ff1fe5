"""Cuts every activation and every matrix in blocks over a plane of r x c ranks: nothing large is replicated.

    activation [batch, ..., h]    batch over tp_row, h over tp_col
    matrix                        the contracted dim over tp_row, the other over tp_col
    y = x W^T                     blocks of x travel along rows, of W along columns; gradients are the other two products
    attention                     whole heads and whole samples on a rank: nothing moves
    vector (bias, norm)           its part over tp_col, the same on every row; gradients summed over tp_row once a step
    norms, cross-entropy          statistics over tp_col

Source: Xu et al. 2021, "An Efficient 2D Method for Training Super-Large Deep Learning Models", arXiv:2104.05343, section 3.
There one row of ranks owns the vectors and broadcasts them; the copies kept here move the same bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from partita.mesh import Mesh
from partita.strategy import Case, Planar


@dataclass(frozen=True)
class Summa(Planar):
    """2D tensor parallelism (Optimus) on any mesh of rows and columns.

    Args:
        row: The mesh axis along which the row of a rank varies.
        column: The mesh axis along which its column varies.

    Example:
        >>> Summa().axes
        ('tp_row', 'tp_col')
    """

    name: ClassVar[str] = "summa"

    def suits(self, mesh: Mesh) -> bool:
        """As square as may be: (columns - 1) activations and (rows - 1) matrices are moved."""
        rows, columns = mesh.size(self.row), mesh.size(self.column)
        return max(rows, columns) <= 2 * min(rows, columns)

    @classmethod
    def cases(cls) -> Sequence[Case]:
        return (
            Case({"tp_row": 2, "tp_col": 2}, {}),
            Case({"tp_row": 2, "tp_col": 2}, {}, workload="llama"),
            Case({"tp_row": 2, "tp_col": 2}, {}, workload="mlp"),
            Case({"tp_row": 2, "tp_col": 3}, {}),
            Case({"dp": 2, "tp_row": 2, "tp_col": 2}, {}),
            Case({"tp_row": 3, "tp_col": 3}, {}, workload="llama"),
            Case({"tp_row": 4, "tp_col": 4}, {}),
        )
