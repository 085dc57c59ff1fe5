"""Checkpoints are written while training goes on, and are there whole or not at all.

    all ranks     agree on who writes what, and copy what they write              `begin`: the only part training waits for
    each rank     writes its file, forces it to disk, leaves word of it            a thread, which sends nothing
    rank 0        waits for every word, writes the index, renames the folder      the same thread: the rename is the commit

A rank that cannot write says so instead; rank 0 hears it and ends the run at the next border between steps (`failed`), where
`wait` raises on every rank alike. The next save and the end of a run wait for a save under way.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from partita.errors import Fault, Refused, RunFailed
from partita.runtime.boxes import Placement
from partita.runtime.index import INDEX, sealed, steps
from partita.runtime.net import Net
from partita.runtime.shards import sync, write
from partita.runtime.sharing import apart, blocks_of, file_of, held_of, listing_of, table_of, writers_of

LEFT = re.compile(r"step-[0-9]{1,18}\.(partial|removed)")  # of a save or a removal that was cut short
LOOK = 0.01  # seconds between two looks at what the other ranks have said
LONGEST = 500  # characters of a problem: it must fit a word
Told = dict[str, Any]


@contextmanager
def slow(net: Net, what: str) -> Iterator[None]:
    """A part that may be silent for long."""
    net.notes.doing(what, slow=True)
    yield
    net.notes.doing(f"after {what}")


@dataclass(frozen=True)
class Saved:
    """What a checkpoint cost.

    Args:
        step: Optimizer steps done.
        bytes: Of all its files.
        waited: Seconds training stood still.
        seconds: From its beginning until it had its name.
    """

    step: int
    bytes: int
    waited: float
    seconds: float

    def json(self) -> dict[str, Any]:
        return {"step": self.step, "bytes": self.bytes, "waited_seconds": self.waited, "seconds": self.seconds}


@dataclass
class _Save:
    """One save under way."""

    final: Path
    table: Mapping[str, Any]  # the index without its files
    blocks: dict[str, Tensor]  # this rank writes
    mark: str  # of the words left about it
    began: float
    waited: float = 0.0
    problem: str = ""  # why this rank, or for rank 0 any rank, could not write
    thread: threading.Thread = field(default_factory=threading.Thread)

    @property
    def partial(self) -> Path:
        return self.final.with_name(f"{self.final.name}.partial")


class Saver:
    """Writes checkpoints of a run, one at a time.

    Args:
        net: All ranks.
        keep: How many of the newest checkpoints stay.
    """

    def __init__(self, net: Net, *, keep: int = 2) -> None:
        self.net, self.keep = net, keep
        self.done: list[Saved] = []  # rank 0's
        self._now: _Save | None = None

    # ---- all ranks call these
    def begin(
        self,
        folder: Path,
        step: int,
        tensors: Mapping[str, Tensor],
        placements: Mapping[str, Placement],
        extra: Any = None,
        *,
        copy: bool = True,
    ) -> None:
        """Start the checkpoint of a step.

        Args:
            folder: Of all checkpoints of the run; made if it is not there.
            step: Optimizer steps done.
            tensors: This rank's parts, by their single-device names; names that share a tensor are stored once. A rank may
                have names that others have not.
            placements: How the cut ones are cut; a name that is absent is whole on every rank that has it.
            extra: A JSON value; rank 0's is kept.
            copy: Whether the tensors may change before it is written.

        Raises:
            Refused: P113, if this step has a complete checkpoint: none is ever overwritten.
            RunFailed: If the folder cannot be written, or the save before this one failed.
        """
        began = time.perf_counter()
        self.wait()
        final = folder / f"step-{step}"
        with slow(self.net, f"saving {final.name}"):
            save = self._agreed(final, step, tensors, placements, extra)
            if copy:
                save.blocks = {key: _copied(block) for key, block in save.blocks.items()}
        save.began, save.waited = began, time.perf_counter() - began
        save.thread = threading.Thread(target=self._work, args=(save,), name=save.final.name, daemon=True)
        self._now = save
        save.thread.start()

    def wait(self) -> None:
        """Until the save under way, if there is one, has its name.

        Raises:
            RunFailed: If the disk is full, say; the message names the rank and what to resume from.
        """
        save = self._now
        if save is None:
            return
        with slow(self.net, f"saving {save.final.name}"):
            save.thread.join()
            self._now = None
            _stop(self.net.gather(save.problem), save.final, self.net)

    # ---- one rank alone may call these
    @property
    def failed(self) -> bool:
        """Whether the save under way has failed; rank 0 hears of every rank."""
        return self._now is not None and bool(self._now.problem)

    def rest(self) -> None:
        """Until this rank's thread is done: nothing of ours runs beside what is measured next."""
        if self._now is not None:
            self._now.thread.join()

    # ---- beginning
    def _agreed(
        self, final: Path, step: int, tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], extra: Any
    ) -> _Save:
        net = self.net
        mine, aliases = apart(tensors)
        held = {name: held_of(t, placements.get(name, ())) for name, t in mine.items()}
        told: Told = {"listing": listing_of(mine, held), "aliases": aliases, "exists": False, "problem": ""}
        if net.rank == 0:
            told["mark"], told["exists"] = os.urandom(8).hex(), final.exists()
            told["problem"] = _of(0, attempt(lambda: prepare(final))[1])
        heard = net.gather(told)
        if heard[0]["exists"]:
            raise Refused(_in_use(final))
        _stop([t["problem"] for t in heard], final, net)
        writers = writers_of([t["listing"] for t in heard])
        table = table_of(step, heard, writers, extra) if net.rank == 0 else {}
        return _Save(final, table, blocks_of(net.rank, mine, held, writers), heard[0]["mark"], 0.0)

    # ---- the thread: no collective, and nothing raises
    def _work(self, save: _Save) -> None:
        wrote, problem = attempt(lambda: self._write(save))
        save.blocks = {}
        mine = {"file": wrote, "problem": _of(self.net.rank, problem)}
        told, lost = attempt(lambda: self._reported(save, mine))
        problem = next((t["problem"] for t in told or [mine] if t["problem"]), "")
        if told and not problem:
            _, lost = attempt(lambda: self._finish(save, told))
        save.problem = problem or _of(self.net.rank, lost)

    def _write(self, save: _Save) -> tuple[str, tuple[int, str]] | None:
        """Write this rank's file: (name, (bytes, sha256)); None if it has nothing to write."""
        if not save.blocks:
            return None
        written = write(save.partial / file_of(self.net.rank), save.blocks)
        return file_of(self.net.rank), (written.bytes, written.sha256)

    def _reported(self, save: _Save, mine: Told) -> list[Told]:
        """Tell rank 0 of this rank's file; rank 0 gets what every rank told, the others nothing."""
        self.net.leave_word(save.mark, mine)
        if self.net.rank:
            return []
        while (told := self.net.words(save.mark)) is None:
            time.sleep(LOOK)
        return told

    def _finish(self, save: _Save, told: Sequence[Told]) -> None:
        files = dict(t["file"] for t in told if t["file"])
        table = json.loads(json.dumps({**save.table, "files": files}))
        write_index(save.partial, {**table, "sha256": sealed(table)})
        commit(save.partial, save.final)
        size = sum(size for size, _ in files.values())
        self.done.append(Saved(table["step"], size, save.waited, time.perf_counter() - save.began))
        prune(save.final, self.keep)


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    net: Net,
    extra: Any = None,
    *,
    keep: int = 2,
) -> Path:
    """Write the checkpoint of a step and wait for it; returns its folder. All ranks call it. See `Saver.begin`."""
    saver = Saver(net, keep=keep)
    saver.begin(folder, step, tensors, placements, extra, copy=False)
    saver.wait()
    return folder / f"step-{step}"


def _copied(block: Tensor) -> Tensor:
    return torch.empty(block.shape, dtype=block.dtype).copy_(block)


# ---------------------------------------------------------------- the folder
def prepare(final: Path) -> None:
    """Make room for a checkpoint, and remove what saves left that were cut short."""
    if final.exists():
        return
    if not final.parent.is_dir():
        final.parent.mkdir(parents=True)
        sync(final.parent.parent)
    for d in final.parent.iterdir():
        if LEFT.fullmatch(d.name) and d.is_dir() and not d.is_symlink():
            shutil.rmtree(d)
    final.with_name(f"{final.name}.partial").mkdir()


def write_index(partial: Path, table: Mapping[str, Any]) -> None:
    """Write the index and force it, and the folder's entries, to disk."""
    for name, (size, _) in table["files"].items():
        if (have := (partial / name).stat().st_size) != size:
            raise OSError(f"{name} has {have} bytes here and {size} where it was written: the ranks do not share this folder")
    with (partial / INDEX).open("x") as file:
        json.dump(table, file)
        file.flush()
        os.fsync(file.fileno())
    sync(partial)


def commit(partial: Path, final: Path) -> None:
    """Give a finished checkpoint its name."""
    partial.rename(final)
    sync(final.parent)


def prune(final: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and never the one just written, nor a link."""
    for step in steps(final.parent)[:-keep]:
        old = final.parent / f"step-{step}"
        if old != final and not old.is_symlink():
            gone = old.rename(old.with_name(f"{old.name}.removed"))  # so that half of one is never taken for a checkpoint
            shutil.rmtree(gone)


# ---------------------------------------------------------------- failing
def attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """What the work returns, and why it could not be done."""
    try:
        return work(), ""
    except OSError as error:
        return None, f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _of(rank: int, problem: str) -> str:
    return f"rank {rank}: {problem}"[:LONGEST] if problem else ""


def _stop(problems: Sequence[str], final: Path, net: Net) -> None:
    """Raise, on every rank, if any rank could not write."""
    problem = next(filter(None, problems), "")
    if not problem:
        return
    if net.rank == 0 and not final.exists():
        shutil.rmtree(final.with_name(f"{final.name}.partial"), ignore_errors=True)
    net.barrier()
    kept = steps(final.parent)
    onward = (
        f"resume from {str(final.parent / f'step-{kept[-1]}')!r}" if kept else "no earlier checkpoint is there to resume from"
    )
    raise RunFailed(f"cannot write checkpoint {final.name} into {str(final.parent)!r}: {problem}; {onward}")


def _in_use(final: Path) -> Fault:
    return Fault(
        "P113",
        f"checkpoint {final.name!r} is there already",
        law="a complete checkpoint is never overwritten",
        cure="another folder, or a step that was not saved",
        at=str(final),
    )
