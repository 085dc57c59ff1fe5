"""The one door to the network: every collective names its axis and writes the ledger.

    ledger    op · axis · bytes of the large side · dtype · for whom, in the order of the calls

An axis of size 1 moves nothing and says nothing. Set-up traffic (`quiet`) is not written: it belongs to no step.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from partita.errors import Fault, Refused
from partita.mesh import Mesh
from partita.runtime.switch.blocks import in_blocks
from partita.runtime.switch.client import Address, Client
from partita.runtime.switch.op import block_reduce, connect, switch_reduce
from partita.runtime.watch import WORD, Board, Notes

OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True)
class Switch:
    """A switch that ranks were given: the axis it adds up over, where it is, and what a reader should know of it."""

    axis: str
    address: Address
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One collective of this rank: bytes of the large side, dtype of the payload, `label` of whoever asked."""

    op: str
    axis: str
    nbytes: int
    dtype: str
    label: str

    def json(self) -> list[Any]:
        return [self.op, self.axis, self.nbytes, self.dtype, self.label]


class Work:
    """A call under way; `held` is kept until it is done."""

    def __init__(self, work: Any, notes: Notes, what: str, held: Tensor | None = None) -> None:
        self._works = work if isinstance(work, list) else [work]
        self._notes, self._what, self._held = notes, what, held

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Block until it is done (on CUDA: order the current stream behind it)."""
        self._notes.wait(self._what)
        for work in reversed(self._works):  # what is received first: by then what was sent has mostly left
            work.wait()
        self._notes.leave()


class Net:
    """One rank's network.

    Args:
        mesh: All ranks.
        rank: This one.
        device: Where its tensors live.
        board: Shared with the parent that forked and watches this rank; None makes a private one.
        folder: Where large results go.
        store: Of the process group; None in a process without one (one rank).
        excluded: Ports whose traffic is not ours to count (the store's).
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        *,
        device: torch.device | None = None,
        board: Board | None = None,
        folder: Path | None = None,
        store: dist.Store | None = None,
        excluded: frozenset[int] = frozenset(),
    ) -> None:
        self.mesh, self.rank, self.ranks = mesh, rank, mesh.ranks
        self.coordinate = mesh.coordinate(rank)
        self.device = device or torch.device("cpu")
        self.folder, self.store, self.excluded = folder, store, excluded
        self.forked = board is not None  # a parent of ours watches this rank
        self.progress: Callable[[int, float], None] | None = None  # where nobody watches the board
        self.ledger: list[Entry] = []
        board = board or Board(mesh.ranks)
        self.notes, self.control, self._board = Notes(board.slots[rank]), board.control, board
        self._quiet = 0
        self.switch: Switch | None = None
        self._ends: dict[str, Client] = {}  # axis -> this rank's end of a switch
        self._groups = {axis: self._join(axis) for axis, size in mesh.axes if size > 1}

    def _join(self, axis: str) -> dist.ProcessGroup:
        mine = None
        for ranks in self.mesh.groups(axis):
            group = dist.group.WORLD if len(ranks) == self.ranks else dist.new_group(list(ranks))
            mine = group if self.rank in ranks else mine
        assert isinstance(mine, dist.ProcessGroup), f"rank {self.rank} has no group on {axis}"
        return mine

    # ---- where we are
    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self.mesh.size(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of this rank along `axis`, whose size is above 1."""
        return self._groups[axis]

    @property
    def axes(self) -> dict[str, str]:
        """Name of the process group -> axis: what a recorder needs to tell axes apart."""
        return {group.group_name: axis for axis, group in self._groups.items()}

    @property
    def backend(self) -> str:
        return "nccl" if self.device.type == "cuda" else "gloo"

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Traffic of set-up, checkpoints and evaluation: not in the ledger."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    # ---- collectives
    @contextmanager
    def _call(self, op: str, axis: str, nbytes: int, dtype: torch.dtype, label: str) -> Iterator[str]:
        name = str(dtype).removeprefix("torch.")
        if not self._quiet:
            self.ledger.append(Entry(op, axis, nbytes, name, label))
        what = f"{op} on {axis} of {nbytes} bytes {name}" + (f" for {label}" if label else "")
        self.notes.enter(what)
        yield what
        self.notes.leave()

    def all_reduce(
        self, tensor: Tensor, axis: str, *, op: str = "sum", label: str = "", overlapped: bool = False
    ) -> Work | None:
        """Reduce `tensor` over the axis, in place; `overlapped` returns at once with something to wait for."""
        if self.size(axis) == 1:
            return None
        with self._call("all_reduce", axis, tensor.nbytes, tensor.dtype, label) as what:
            if overlapped:
                assert tensor.is_contiguous(), f"{label}: an overlapped all_reduce needs one block of memory"
                return Work(dist.all_reduce(tensor, OPS[op], self.group(axis), async_op=True), self.notes, what)
            whole = tensor.contiguous()
            dist.all_reduce(whole, OPS[op], self.group(axis))
        if whole is not tensor:
            tensor.copy_(whole)
        return None

    def all_gather(self, tensor: Tensor, axis: str, *, dim: int = 0, label: str = "") -> Tensor:
        """The ranks' tensors side by side along `dim`."""
        size = self.size(axis)
        if size == 1:
            return tensor
        mine = tensor.movedim(dim, 0).contiguous()
        out = mine.new_empty((size * mine.shape[0], *mine.shape[1:]))
        with self._call("all_gather", axis, out.nbytes, out.dtype, label):
            dist.all_gather_single(out, mine, self.group(axis))
        return out.movedim(0, dim)

    def reduce_scatter(self, tensor: Tensor, axis: str, *, dim: int = 0, label: str = "") -> Tensor:
        """This rank's block along `dim` of the sum of the ranks' tensors."""
        size = self.size(axis)
        if size == 1:
            return tensor
        whole = tensor.movedim(dim, 0).contiguous()
        out = whole.new_empty((whole.shape[0] // size, *whole.shape[1:]))
        with self._call("reduce_scatter", axis, whole.nbytes, whole.dtype, label):
            dist.reduce_scatter_single(out, whole, group=self.group(axis))
        return out.movedim(0, dim)

    def all_gather_into(
        self, out: Tensor, mine: Tensor, axis: str, *, label: str = "", overlapped: bool = False
    ) -> Work | None:
        """Fill `out`, on an axis of several ranks, with the ranks' tensors one after another; both are one block of memory."""
        with self._call("all_gather", axis, out.nbytes, out.dtype, label) as what:
            work = dist.all_gather_single(out, mine, self.group(axis), async_op=overlapped)
            return Work(work, self.notes, what) if overlapped else None

    def reduce_scatter_into(
        self, out: Tensor, whole: Tensor, axis: str, *, label: str = "", overlapped: bool = False
    ) -> Work | None:
        """Fill `out`, on an axis of several ranks, with this rank's block of the sum of the ranks' `whole`, each one block."""
        with self._call("reduce_scatter", axis, whole.nbytes, whole.dtype, label) as what:
            work = dist.reduce_scatter_single(out, whole, group=self.group(axis), async_op=overlapped)
            return Work(work, self.notes, what) if overlapped else None

    def all_to_all_into(self, out: Tensor, sent: Tensor, axis: str, *, label: str = "") -> None:
        """Fill `out`, on an axis of several ranks, with what each sent this one: `sent` is an equal part for each rank."""
        with self._call("all_to_all", axis, sent.nbytes, sent.dtype, label):
            dist.all_to_all_single(out, sent, group=self.group(axis))

    def all_to_all(self, tensor: Tensor, axis: str, *, cut: int = 0, join: int = 0, label: str = "") -> Tensor:
        """Cut the tensor along dim `cut`, give each rank its piece, and join the pieces received along dim `join`."""
        size = self.size(axis)
        if size == 1:
            return tensor
        send = torch.stack(tensor.chunk(size, cut)).contiguous()
        out = torch.empty_like(send)
        with self._call("all_to_all", axis, send.nbytes, send.dtype, label):
            dist.all_to_all_single(out, send, group=self.group(axis))
        return torch.cat(out.unbind(0), join)

    def broadcast(
        self, tensor: Tensor, axis: str, *, source: int = 0, label: str = "", overlapped: bool = False
    ) -> Work | None:
        """Give every rank of the axis the tensor of its rank number `source`, in place; `overlapped` as in `all_reduce`."""
        if self.size(axis) == 1:
            return None
        with self._call("broadcast", axis, tensor.nbytes, tensor.dtype, label) as what:
            if overlapped:
                assert tensor.is_contiguous(), f"{label}: an overlapped broadcast needs one block of memory"
                work = dist.broadcast(tensor, group=self.group(axis), group_src=source, async_op=True)
                return Work(work, self.notes, what, tensor)
            whole = tensor.contiguous()
            dist.broadcast(whole, group=self.group(axis), group_src=source)
        if whole is not tensor:
            tensor.copy_(whole)
        return None

    # ---- sums in the network
    def connect(self, axis: str, op: str) -> None:
        """Have `add_up` on the axis go through the switch this rank was given, or as whole numbers through gloo.

        Raises:
            Refused: P115, if there is no switch, or tensors are on a GPU.
        """
        group, size = self.group(axis), self.size(axis)
        if self.device.type == "cuda" or (op == "switch_reduce" and (self.switch is None or self.switch.axis != axis)):
            law = "a switch stands beside the gloo ranks that partita itself forks"
            cure = 'partita train by itself; reduce = "gloo"; or the strategy ddp'
            raise Refused(Fault("P115", f"no switch adds up over {axis!r} here", "", law, cure, "strategy.in_network.reduce"))
        if op == "block_reduce":
            connect(str(group.group_name), partial(into, partial(blockwise, group, size)))
            return
        assert self.switch is not None
        job = next(n for n, ranks in enumerate(self.mesh.groups(axis)) if self.rank in ranks)
        self._ends[axis] = Client(self.switch.address, job, self.coordinate[axis], size)
        connect(str(group.group_name), partial(into, self._ends[axis].all_reduce))

    def add_up(self, tensor: Tensor, axis: str, op: str, *, label: str = "") -> None:
        """Sum a flat tensor over an axis of several ranks, in place, as `connect` has it."""
        with self._call(op, axis, tensor.nbytes, tensor.dtype, label):
            call = switch_reduce if op == "switch_reduce" else block_reduce
            call(tensor, str(self.group(axis).group_name))

    @property
    def datagrams(self) -> int:
        """Bytes of packets this rank has sent to switches."""
        return sum(end.sent for end in self._ends.values())

    # ---- one peer
    def send(self, tensor: Tensor, axis: str, peer: int, *, label: str = "") -> Work:
        """Send to the rank at coordinate `peer` of the axis; messages of a channel arrive in order."""
        whole = tensor.detach().contiguous()
        with self._call("send", axis, whole.nbytes, whole.dtype, label) as what:
            work = dist.isend(whole, group=self.group(axis), group_dst=peer)
        return Work(work, self.notes, what, whole)

    def receive(self, tensor: Tensor, axis: str, peer: int, *, label: str = "") -> Work:
        """Begin to fill a contiguous tensor from the rank at coordinate `peer` of the axis."""
        assert tensor.is_contiguous(), f"{label}: what is received needs one block of memory"
        with self._call("receive", axis, tensor.nbytes, tensor.dtype, label) as what:
            work = dist.irecv(tensor, group=self.group(axis), group_src=peer)
        return Work(work, self.notes, what, tensor)

    def exchange(self, out: Tensor, to: int, into: Tensor, source: int, axis: str, *, label: str = "") -> Work:
        """Begin to send `out` to coordinate `to` of the axis while `into` is filled from coordinate `source`.

        Both are one block of memory. Begun together: two ranks that each send first and receive later would wait for each
        other where a message needs its receiver.
        """
        assert out.is_contiguous(), f"{label}: what is sent needs one block of memory"
        assert into.is_contiguous(), f"{label}: what is received needs one block of memory"
        group = self.group(axis)
        with (
            self._call("send", axis, out.nbytes, out.dtype, label) as what,
            self._call("receive", axis, into.nbytes, into.dtype, label),
        ):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, out, group=group, group_peer=to),
                    dist.P2POp(dist.irecv, into, group=group, group_peer=source),
                ]
            )
        return Work(works, self.notes, what, out)

    # ---- all ranks, outside the ledger
    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, in rank order."""
        if self.ranks == 1:
            return [json.loads(json.dumps(value))]
        raw = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)
        with self.quiet(), self._call("all_gather", "all", len(raw), raw.dtype, "values"):
            sizes = torch.zeros(self.ranks, dtype=torch.int64, device=self.device)
            dist.all_gather_single(sizes, torch.tensor([len(raw)], device=self.device))
            room = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=self.device)
            room[: len(raw)] = raw
            out = torch.zeros(self.ranks * len(room), dtype=torch.uint8, device=self.device)
            dist.all_gather_single(out, room)
        return [
            json.loads(row[:n].numpy().tobytes()) for row, n in zip(out.cpu().chunk(self.ranks), sizes.tolist(), strict=True)
        ]

    def leave_word(self, mark: str, value: Any) -> None:
        """Leave a short JSON value for the other ranks; no collective, from any thread. A later one takes its place.

        Forked ranks leave it in shared memory, which no full disk can fail; ranks of torchrun in the store.
        """
        text = json.dumps([mark, value])
        if not self.forked and self.store is not None:
            self.store.set(f"partita/word/{mark}/{self.rank}", text)
            return
        slot = self._board.slots[self.rank]
        slot.word, slot.words = text.encode()[: WORD - 1], slot.words + 1

    def words(self, mark: str) -> list[Any] | None:
        """What every rank has left under this mark; None while one is missing. No collective, from any thread."""
        if not self.forked and self.store is not None:
            keys = [f"partita/word/{mark}/{rank}" for rank in range(self.ranks)]
            if not self.store.check(keys):  # `wait` would keep the store from the other threads
                return None
            found = [json.loads(self.store.get(key)) for key in keys]
        else:
            slots = self._board.slots
            if not all(slot.words for slot in slots):
                return None
            found = [_read(slot) for slot in slots]
        return [value for _, value in found] if all(said == mark for said, _ in found) else None

    def depart(self) -> None:
        """The last thing a rank does: one that left early would break its neighbours' connections. Not noted."""
        if self.ranks > 1:
            dist.barrier()

    def share(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank."""
        return self.gather(value if self.rank == 0 else None)[0]


def into(summed: Callable[[NDArray], NDArray], tensor: Tensor) -> None:
    """Replace a flat tensor's values by their sums; half types are summed in float32."""
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    tensor.copy_(torch.from_numpy(summed(wide.detach().numpy())))


def blockwise(group: dist.ProcessGroup, size: int, values: NDArray) -> NDArray:
    """Sums of floats as a switch makes them, by gloo's all_reduce of whole numbers."""

    def reduced(op: str, lanes: NDArray) -> NDArray:
        whole = torch.from_numpy(lanes)
        dist.all_reduce(whole, OPS[op], group)
        return whole.numpy()

    return in_blocks(values, size, partial(reduced, "max"), partial(reduced, "sum"))


def _read(slot: Any) -> list[Any]:
    """A rank's last word: [mark, value]; of no mark while it is being written."""
    try:
        return json.loads(slot.word)
    except ValueError:
        return ["", None]
