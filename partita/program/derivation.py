"""What splitting one dim class over one axis was found to mean: layouts, moves, and what was decided at each event."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from partita.program.events import Partial, Phase, Split

Label = tuple[str, int]  # a label of a signature, and which of its atoms is split


@dataclass(frozen=True, slots=True)
class Move:
    """A collective found by the rule.

    Args:
        event: Index among `program.events()`; it happens just before that event (their number: at the end).
        op: all_reduce | all_gather | reduce_scatter | all_to_all; of a product in blocks broadcast | send | receive.
        tensor: What is moved; for `inner` statistics the input they are statistics of.
        nbytes: The large side, on this rank under the axes rewritten before.
        inner: A small exchange inside an op that runs along a split dim (softmax, batch norm).
        keeps: For `inner`: the dims of `tensor` the statistics have; None means the tensor itself moves.
        values: For `inner`: numbers per position.
        axis: Another axis than that of the derivation.
    """

    event: int
    op: str
    tensor: int
    nbytes: int
    dtype: str
    phase: Phase
    module: str
    inner: bool = False
    keeps: tuple[int, ...] | None = None
    values: int = 1
    axis: str = ""


@dataclass(slots=True)
class Taken:
    """What was decided at one event: everything `apply` must do there.

    Args:
        label: The label (and which of its atoms) the op runs split under; None: not split.
        partial: Positions of Partial inputs that travelled through unrepaired; empty if none did.
        moved: (tensor, layouts it had, layout needed), in `Split | Partial | None` form.
        product: A product in blocks, by its form: "ab" | "abt" | "atb" | "lookup".
    """

    label: Label | None = None
    partial: tuple[int, ...] = ()
    moved: list[tuple[int, frozenset[Split | Partial | None], Split | Partial | None]] = field(default_factory=list)
    product: str = ""


@dataclass(frozen=True)
class Derivation:
    """Layouts and collectives of one dim class split over one axis.

    Args:
        layouts: Tensors that are not replicated along the axis.
        moves: In the order they happen.
        labels: Per event of `program.events()`.
        across: A second axis, along which tensors of products in blocks are split too; "" if there is none.
        ranks: Of it.
        blocks: Their layouts along it.
    """

    axis: str
    size: int
    atoms: frozenset[int]
    layouts: Mapping[int, Split | Partial]
    moves: tuple[Move, ...]
    labels: tuple[Taken, ...]
    across: str = ""
    ranks: int = 1
    blocks: Mapping[int, Split] = field(default_factory=dict)
