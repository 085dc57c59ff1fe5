"""The single-device Program of a workload: captured small and said large, and kept as JSON between runs.

A catalogue model is captured with three blocks and two samples, in a fraction of a second, and stretched to its real depth
and batch. This file imports no torch; only a program that is not in the cache needs it.
"""

import hashlib
import importlib
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from partita.program.fold import fold, stretch
from partita.program.program import Program
from partita.program.resize import resized
from partita.program.text import FORMAT, from_json, to_json
from partita.workload import GPT, Llama, Workload

VERSION = 1  # of what capture says: raise it when equal workloads get other programs
SAMPLES = 2  # captured; the batch of size 1 would have no name
BLOCKS = 3  # a first, a middle and a last one


def program_of(workload: Workload, cache: Path | None = None, *, exact: bool = False) -> Program:
    """One optimizer step of a workload on one device: `accumulate` microbatches of batch / accumulate samples.

    Args:
        workload: Of any kind; `hf:` models the catalogue knows are taken from it.
        cache: Folder of kept programs; None keeps nothing.
        exact: An `hf:` model is captured itself, module paths and all, although the catalogue knows it.

    Raises:
        Refused: P115, when the module cannot be captured.
    """
    small = _small(workload, exact=exact)
    path = cache / "programs" / f"{_key(small, exact=exact)}.json" if cache else None
    program = _kept(path)
    if program is None:
        program = fold(_captured(small, exact=exact))
        _keep(path, program)
    layers = getattr(workload.spec, "layers", 0)
    if layers != getattr(small.spec, "layers", 0):
        program = stretch(program, layers)
    return dressed(_sized(program, workload), workload)


def dressed(program: Program, workload: Workload) -> Program:
    """The program with what the workload says about the step around it."""
    return replace(
        program,
        microbatches=workload.accumulate,
        reduce_dtype=workload.reduce_dtype,
        clip=workload.clip is not None,
    )


def _small(workload: Workload, *, exact: bool) -> Workload:
    """The same kind of workload, as small as it can be captured."""
    same = Workload(
        model=workload.model if exact or workload.spec is None else type(workload.spec).kind,
        spec=workload.spec,
        batch=SAMPLES if _scales(workload) else workload.batch // workload.accumulate,
        dtype=workload.dtype,
        optimizer=workload.optimizer,
        seed=0 if _scales(workload) else workload.seed,
        extra=workload.extra,
    )
    if isinstance(same.spec, GPT | Llama) and same.spec.layers > BLOCKS and not exact:
        return replace(same, spec=replace(same.spec, layers=BLOCKS))
    return same


def _scales(workload: Workload) -> bool:
    """May a small batch stand for a large one? Not for a user's own code, which may do anything with it."""
    return not workload.model.startswith("python:")


def _sized(program: Program, workload: Workload) -> Program:
    samples = workload.batch // workload.accumulate
    return resized(program, "batch", samples) if _scales(workload) else program


def _captured(workload: Workload, *, exact: bool) -> Program:
    capture = importlib.import_module("partita.runtime.capture")
    subjects = importlib.import_module("partita.runtime.subject")
    return capture.capture(subjects.subject_of(workload, synthetic=True), workload.batch)


# ---- the cache
def _key(workload: Workload, *, exact: bool) -> str:
    spec = None if workload.spec is None else [type(workload.spec).kind, asdict(workload.spec)]
    own = {**asdict(workload), "spec": spec}
    config = ""
    if workload.model.startswith("hf:"):
        config = Path(workload.model.removeprefix("hf:")).read_text(encoding="utf-8")
    text = json.dumps([VERSION, FORMAT, exact, own, config], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _kept(path: Path | None) -> Program | None:
    """A kept program; whatever cannot be read counts as absent."""
    if path is None or not path.is_file():
        return None
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _keep(path: Path | None, program: Program) -> None:
    """Keep a program, whole or not at all; a cache that cannot be written is no reason to stop."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8") as part:
            part.write(to_json(program))
        Path(part.name).replace(path)
    except OSError:
        return
