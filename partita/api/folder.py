"""The run folder: where a run writes, what it goes on from, and what stands in it before the first rank starts.

plan.toml · predicted.json · metrics.jsonl · checkpoints/step-N/ · summary.json        no absolute path inside: it may be moved
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from partita.api.planning import Estimate, with_workload
from partita.errors import FULL, Fault, Refused, RunFailed
from partita.pages.json import dumps
from partita.plans import Plan
from partita.runtime.checkpoint import latest, peek
from partita.runtime.launch import first_rank

PATIENCE = 10.0  # seconds a run waits for another one in its folder to end


def folders(plan: Plan, out: str | Path | None, resume: str | Path | None, *, own: bool) -> tuple[Path | None, Path | None]:
    """(where this run writes, where it goes on from)."""
    source = Path(resume) if resume else None
    if out is not None:
        return Path(out), source
    if source is not None:
        return source, source
    if own:
        return None, None
    name = with_workload(plan).model.rpartition(":")[2].replace("/", "-").removesuffix("-config.json").strip("-")
    return _free(Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"), None


def _free(folder: Path) -> Path:
    """The folder, or the first of its kind that is not there: two runs may begin in one second."""
    number = 1
    free = folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def folder_faults(folder: Path | None, source: Path | None) -> list[Fault]:
    if folder is None or folder == source or not folder.exists() or not first_rank():  # the first may have made it
        return []
    if folder.is_dir() and not any(folder.iterdir()):
        return []
    have = f"{len(list(folder.iterdir()))} entries" if folder.is_dir() else "a file"
    law = "a run never writes over another; an empty folder is fine"
    return [Fault("P113", f"{str(folder)!r} is in use", have, law, f"another folder, or resume={str(folder)!r}", "out")]


def steps_left(source: Path | None, steps: int) -> list[Fault]:
    if source is None:
        return []
    done = peek(latest(source / "checkpoints" if (source / "checkpoints").is_dir() else source)).step
    if done < steps:
        return []
    law = "steps counts all steps of the run, those before the checkpoint included"
    return [
        Fault(
            "P112", f"steps = {steps} leaves nothing to do", f"the checkpoint has {done} steps", law, f"steps > {done}", "steps"
        )
    ]


class Opening:
    """What stands in a run folder before the first rank starts; taken back if the ranks refuse the input.

    Args:
        folder: Of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before: dict[Path, bytes | None] = {}
        self._made = [p for p in (folder, *folder.parents) if not p.exists()]

    def make(self) -> Path:
        """The folder itself, which may be there."""
        with self._disk():
            self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder

    def write(self, plan: Plan, predicted: Estimate) -> None:
        """Write the plan and the prediction; what is said of a run that goes on is no longer its summary.

        Raises:
            Refused: P109, if the folder cannot be written.
            RunFailed: If the disk is full.
        """
        if not first_rank():
            return
        with self._disk():
            if not (self.folder / "plan.toml").exists() and plan.workload is not None:
                self._put("plan.toml", plan.to_toml(self.folder))
            self._put("predicted.json", dumps(predicted.json()) + "\n")
            for name in ("summary.json", "timeline.json"):
                self._keep(name).unlink(missing_ok=True)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.undo()
            if error.errno in FULL:
                raise RunFailed(f"cannot write {str(self.folder)!r}: {error.strerror}; nothing was started") from None
            law = "a run writes its plan, its metrics and its checkpoints into its folder"
            what, cure = f"{str(self.folder)!r} cannot be written", "a folder of yours"
            raise Refused(Fault("P109", what, error.strerror or str(error), law, cure, "-o")) from None

    def _keep(self, name: str) -> Path:
        path = self.folder / name
        self._before[path] = path.read_bytes() if path.is_file() else None
        return path

    def _put(self, name: str, text: str) -> None:
        put(self._keep(name), text)

    def undo(self) -> None:
        """Leave the folder as it was found, as far as the disk allows."""
        with contextlib.suppress(OSError):
            for path, before in self._before.items():
                path.unlink(missing_ok=True) if before is None else path.write_bytes(before)
            for made in self._made:
                made.rmdir()


def put(file: Path, text: str) -> None:
    """Write a small file whole, or leave the one before as it is."""
    part = file.with_name(f"{file.name}.partial")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """While a run writes into its folder, no other does: one that still ends, or still saves, is waited for.

    Raises:
        Refused: P113, if it goes on.
    """
    if not first_rank():
        yield
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        _lock(fd, folder)  # forked ranks hold it too: it is free once the last of them is gone
        yield
    finally:
        os.close(fd)


def _lock(fd: int, folder: Path) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                law = "one run at a time writes into a folder"
                what, cure = f"{str(folder)!r} is in use by a run that goes on", "wait for it, or end it with Ctrl-C"
                raise Refused(Fault("P113", what, f"waited {PATIENCE:g} s", law, cure, "--resume")) from None
            time.sleep(0.1)
        except OSError:  # a filesystem without locks
            return
        else:
            return
