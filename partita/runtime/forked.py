"""Forked gloo ranks on this machine: direct children, no other children, results as JSON over pipes.

    parent ── fork ──▶ rank 0 .. n-1
      │ waits on pipes and exits, reads their notes in shared memory
      └ the first rank to die, raise, stop or keep the others waiting is named, and all are ended

Children never outlive the parent, and Ctrl-C is the parent's: it asks them to finish the step.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import gc
import json
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from partita.errors import Fault, RankLost, Refused, RunFailed
from partita.mesh import Mesh
from partita.runtime.net import Net, Switch
from partita.runtime.watch import Board, Watcher

Task = Callable[[Net], Any]
Progress = Callable[[int, float], None]  # steps done, last loss

PR_SET_PDEATHSIG = 1  # prctl(2): the signal this process gets when its parent is gone
ECHO = 0.7  # seconds a dead rank gets to be noticed before a neighbour's broken connection is taken for the cause
GLOO_TIMEOUT = datetime.timedelta(minutes=30)  # the watching parent decides much earlier


class _Warm(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def warm_up() -> None:
    """Do once, before the fork, what is slow the first time in a process: a dispatch mode, an optimizer's lazy imports."""
    weight = torch.nn.Parameter(torch.zeros(1))
    with _Warm():
        torch.optim.AdamW([weight]).step()


class Forked:
    """One run on forked ranks.

    Args:
        mesh: The ranks.
        work: Of each.
        folder: Where they may leave large results.
        quiet: Seconds without a sign of life before a rank that keeps the others waiting is given up.
        progress: Told of steps done and the last loss.
        settle: Called in each child with its rank: puts it on its network, and nowhere else.
        switch: The switch they reduce through, if there is one.
    """

    def __init__(
        self,
        mesh: Mesh,
        work: Task,
        *,
        folder: Path | None,
        quiet: float,
        progress: Progress | None,
        settle: Callable[[int], None],
        switch: Switch | None = None,
    ) -> None:
        self.mesh, self.work, self.folder, self.quiet = mesh, work, folder, quiet
        self.progress, self.settle, self.switch = progress, settle, switch
        self.told = 0  # steps the caller knows of
        self.board = Board(mesh.ranks)
        self.results: dict[int, Any] = {}
        self.errors: dict[int, dict[str, Any]] = {}
        self.processes: list[Any] = []
        self.pipes: dict[Connection, int] = {}
        self.first_error: float | None = None

    def run(self) -> list[Any]:
        warm_up()
        with tempfile.TemporaryDirectory(prefix="partita-") as private, self._interrupts():
            try:
                self._start(Path(private))
                self._collect()
            finally:
                self._end()
        return [self.results[r] for r in range(self.mesh.ranks)]

    def _start(self, private: Path) -> None:
        context = mp.get_context("fork")
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # or the first collection of every rank copies all pages it shares with this process
        try:
            self._fork(context, private)
        finally:
            gc.unfreeze()
        self.watcher = Watcher(self.board.slots, [p.pid for p in self.processes], self.quiet)

    def _fork(self, context: Any, private: Path) -> None:
        for rank in range(self.mesh.ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=self._child, args=(rank, private, theirs, os.getpid()), name=f"rank-{rank}", daemon=True
            )
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # fork in a threaded process: ranks use one thread and no lock of ours
                process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes[mine] = rank

    def _collect(self) -> None:
        while len(self.results) < self.mesh.ranks:
            sentinels = [p.sentinel for r, p in enumerate(self.processes) if r not in self.results and r not in self.errors]
            wait([*self.pipes, *sentinels], timeout=0.25)
            self._read()
            self._blame()
            self._tell()

    def _tell(self) -> None:
        control = self.board.control
        if self.progress is not None and control.done > self.told:
            self.told = control.done
            self.progress(self.told, control.loss)

    def _read(self) -> None:
        for pipe in wait(list(self.pipes), timeout=0):
            assert isinstance(pipe, Connection)
            rank = self.pipes[pipe]
            try:
                message = json.loads(pipe.recv_bytes())
            except EOFError:  # it left without a word; its exit code tells
                message = None
                self.processes[rank].join(1.0)
            if message is None or "error" not in message:
                del self.pipes[pipe]
                pipe.close()
            if message is not None:
                (self.errors if "error" in message else self.results)[rank] = message.get("error", message.get("result"))
                if "error" in message:
                    del self.pipes[pipe]
                    pipe.close()

    def _blame(self) -> None:
        """Raise for the rank to blame, if there is one."""
        silent = [r for r in range(self.mesh.ranks) if r not in self.results and r not in self.errors]
        dead = [r for r in silent if self.processes[r].exitcode is not None]
        if dead:
            self._read()  # its last words may have come between
            dead = [r for r in dead if r not in self.results and r not in self.errors]
        if dead:
            raise self._died(dead[0])
        own = {r: e for r, e in self.errors.items() if not e["echo"]}
        if own:
            raise _raised(own, self.watcher)
        if self.errors:
            self.first_error = self.first_error or time.monotonic()
            if time.monotonic() - self.first_error > ECHO:
                raise _raised(self.errors, self.watcher)
        if self.board.control.interrupted and not self.board.control.listening:
            raise KeyboardInterrupt
        lost = self.watcher.lost(silent)
        if lost:
            raise RankLost(f"rank {lost[0]} of {self.mesh.ranks} {lost[1]}; all ranks were ended", lost[0])

    def _died(self, rank: int) -> RankLost:
        code = self.processes[rank].exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        hint = " (the system kills with SIGKILL when memory runs out)" if code == -signal.SIGKILL else ""
        others = "; ".join(f"rank {r} was {self.watcher.at(r)}" for r in range(self.mesh.ranks) if r != rank)
        told = f"rank {rank} of {self.mesh.ranks} {how}{hint} {self.watcher.at(rank)}"
        return RankLost(told + (f"; {others}" if others else "") + "; all ranks were ended", rank)

    def _end(self) -> None:
        for rank, process in enumerate(self.processes):
            if rank in self.results and len(self.results) == self.mesh.ranks:
                process.join(5.0)
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()
            process.close()
        for pipe in self.pipes:
            pipe.close()

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """The first Ctrl-C asks the ranks to finish the step, the second ends them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: Any) -> None:
            if self.board.control.interrupted:
                raise KeyboardInterrupt
            self.board.control.interrupted = 1

        kept = signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, kept)

    # ---- the child's side
    def _child(self, rank: int, private: Path, pipe: Connection, parent: int) -> None:
        code = 1
        try:
            _bind(parent)
            self.settle(rank)
            net = _join(self.mesh, rank, private / "store", self.board, self.folder)
            net.switch = self.switch
            net.notes.listen()
            result = self.work(net)
            pipe.send_bytes(json.dumps({"result": result}).encode())
            code = 0
            net.depart()
        except BaseException as error:
            if code:
                pipe.send_bytes(json.dumps({"error": _words(error)}).encode())
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)  # at once: the open sockets of a failed rank keep its neighbours waiting


def _bind(parent: int) -> None:
    """Tie this child to its parent, and leave Ctrl-C to it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.disable()  # a rank that aborts is named by its parent, not by a dump of every thread
    torch.set_num_threads(1)  # before any op: a thread pool does not survive a fork


def _join(mesh: Mesh, rank: int, store: Path, board: Board, folder: Path | None) -> Net:
    files = dist.FileStore(str(store), mesh.ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=mesh.ranks, timeout=GLOO_TIMEOUT)
    return Net(mesh, rank, board=board, folder=folder, store=files)


# ---------------------------------------------------------------- errors through the pipe
def _words(error: BaseException) -> dict[str, Any]:
    """An exception as JSON. `echo`: gloo complains of a neighbour, which is another rank's fault."""
    frames = [f"{f.filename}:{f.lineno} in {f.name}" for f in traceback.extract_tb(error.__traceback__)]
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "faults": [asdict(f) for f in error.faults] if isinstance(error, Refused) else [],
        "ours": isinstance(error, RunFailed),
        "echo": isinstance(error, RuntimeError) and ("transport/tcp" in str(error) or "gloo" in str(error)),
        "frames": [f for f in frames if "/torch/" not in f and "/partita/runtime/" not in f][-3:],
        "trace": "".join(traceback.format_exception(error)),
    }


def _raised(errors: dict[int, dict[str, Any]], watcher: Watcher) -> Exception:
    """The exception to raise in the parent: a refusal first, else the lowest rank's own."""
    for rank in sorted(errors, key=lambda r: (not errors[r]["faults"], r)):
        error = errors[rank]
        if error["faults"]:
            return Refused(*(Fault(**f) for f in error["faults"]))
        if error["ours"]:
            failed: Exception = RunFailed(error["text"])
        else:
            where = "".join(f"\n  at {f}" for f in reversed(error["frames"]))
            failed = RunFailed(f"rank {rank} failed {watcher.at(rank)}: {error['kind']}: {error['text']}{where}")
        failed.add_note(error["trace"])
        return failed
    raise AssertionError("no error to raise")
