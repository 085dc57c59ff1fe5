"""What one rank does in a period: computing, collectives, and the tensors they touch.  Pure data, no torch.

Tensors are single-assignment: an op makes new ones. Every tensor carries its named dims as tuples of *atoms* (see
`dims.py`) and, per mesh axis that has been split, a layout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from partita.program.dims import Dim, Signature

WIDTH = {  # bytes per element
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


RECEIVED = "received."  # beginning of the names of what a pipeline's role has from another rank


class Phase(StrEnum):
    """When in a period an event happens."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    SYNC = "sync"  # after backward: what a data axis repairs
    OPTIMIZER = "optimizer"


class Kind(StrEnum):
    """What a tensor is; the kind of a storage is that of its root."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    ACTIVATION = "activation"
    BUFFER = "buffer"
    INPUT = "input"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Split:
    """Each rank of the axis holds one block of atom number `atom` of dim number `dim`."""

    dim: int
    atom: int


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds a summand; the whole value is their sum."""

    op: str = "sum"


@dataclass(frozen=True, slots=True)
class Rows:
    """Each rank of the axis owns consecutive rows of dim 0, ceil(rows / ranks) of them; the last ranks may own fewer, or none.

    Ops of forward and backward see the whole value; the optimizer steps on the rows.

    Args:
        held: A rank keeps its own rows only; else it keeps all of them.
    """

    held: bool = True


Layout = Split | Partial | None  # of ops; None: replicated


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value.

    Args:
        id: Its index in `Program.tensors`.
        shape: Whole shape, as the single device sees it.
        dtype: A key of `WIDTH`.
        dims: The atoms of each dim, outermost first; () is a dim of size 1.
        kind: What it is.
        name: Parameter, buffer or input name; empty for activations.
        root: Id of the tensor whose storage it views (itself if it owns one).
        layouts: Axis -> `Split`, `Partial` or `Rows`; an axis that is absent holds it replicated.
        host: It lives in the host's memory, where that is another than the device's.
    """

    id: int
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[Dim, ...]
    kind: Kind = Kind.ACTIVATION
    name: str = ""
    root: int = -1
    layouts: Mapping[str, Split | Partial | Rows] = field(default_factory=dict)
    host: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return math.prod(self.shape) * WIDTH[self.dtype]


@dataclass(frozen=True, slots=True)
class Compute:
    """One op on one rank.

    Args:
        op: aten name without namespace, e.g. "addmm".
        module: Path of the module it ran in.
        phase: When it ran.
        ins, outs: Tensor ids read and made.
        flop: Of this rank, already divided by every split the op runs under.
        signature: Its einops-like pattern; None means opaque (nothing in it is split).
        view: Moves no bytes.
        saves: In the forward pass: autograd keeps some of what it reads or makes for its backward.
    """

    op: str
    module: str
    phase: Phase
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    flop: int = 0
    signature: Signature | None = None
    view: bool = False
    saves: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective call.

    Args:
        op: all_reduce | all_gather | reduce_scatter | all_to_all | broadcast; send | receive, with one peer of the axis.
        axis: The mesh axis whose group talks.
        tensors: Ids of what is moved (several: one flat bucket).
        nbytes: Bytes of the large side on this rank: the all_reduce tensor, the gather's output, the scatter's input.
        dtype: Of the payload; a sum is rounded in it.
        phase: When it is called.
        module: For whom.
        overlapped: Runs on the axis's own stream and is waited for at the end of the backward phase; else it blocks compute.
        once: With several microbatches, happens with the last one only.
        keeps: Of statistics: the dims of the tensor they have; None means the tensor itself is moved.
        values: Of statistics: numbers per position.
    """

    op: str
    axis: str
    tensors: tuple[int, ...]
    nbytes: int
    dtype: str
    phase: Phase
    module: str = ""
    overlapped: bool = False
    once: bool = False
    keeps: tuple[int, ...] | None = None
    values: int = 1


Event = Compute | Collective


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` copies of a run of events; the tensors made in it exist once per copy.

    With count > 1 the events are those of one middle block; its neighbours, the first and the last block, stand in
    segments of their own, so whatever crosses the body's edge has a peeled copy to differ in. Change one with
    `dataclasses.replace`, so that what `fold` knows about it stays.

    Args:
        count: Copies.
        events: Of one copy.
        block: Module path of the block the events are of, e.g. "blocks.1"; empty outside a fold.
        carried: (outside, inside): where the copy next to a peeled block reads `outside`, the others read `inside` of the
            copy before them.
        part: Of a pipeline's role: which turns run these events, e.g. "2F"; empty elsewhere.
        when: Numbers of the steps of the period in which the events happen; empty: in every one.
    """

    count: int
    events: tuple[Event, ...]
    block: str = ""
    carried: tuple[tuple[int, int], ...] = ()
    part: str = ""
    when: tuple[int, ...] = ()
