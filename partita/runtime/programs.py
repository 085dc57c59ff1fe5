"""The single-device Program of a workload: captured small and said large, and kept as JSON between runs.

A catalogue model is captured with three blocks and two samples, in a fraction of a second, and stretched to its real depth
and batch. This file imports no torch; only a program that is not in the cache needs it.
"""

import hashlib
import importlib
import json
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path

from partita.program.fold import fold, stretch
from partita.program.program import Program
from partita.program.resize import resized
from partita.program.text import FORMAT, from_json, to_json
from partita.workload import GPT, Llama, Workload

VERSION = 7
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
    few = _few_blocks(workload, exact=exact)
    program = _sized(workload, cache, exact=exact, few=few)
    if few and not any(s.block for s in program.segments):  # its blocks are not alike: captured as deep as it is
        few, program = False, _sized(workload, cache, exact=exact, few=False)
    return dressed(stretch(program, getattr(workload.spec, "layers", 0)) if few else program, workload)


def _sized(workload: Workload, cache: Path | None, *, exact: bool, few: bool) -> Program:
    """The program of the workload's microbatch; `few`: with three blocks."""
    samples = workload.batch // workload.accumulate
    try:
        return resized(_small_program(workload, SAMPLES, cache, exact=exact, few=few), "batch", samples)
    except ValueError:  # the user's own code, or an op without a rule: captured as large as it is
        return _small_program(workload, samples, cache, exact=exact, few=few)


def dressed(program: Program, workload: Workload) -> Program:
    """The program with what the workload says about the step around it."""
    return replace(
        program,
        microbatches=workload.accumulate,
        reduce_dtype=workload.reduce_dtype,
        clip=workload.clip is not None,
    )


def _few_blocks(workload: Workload, *, exact: bool) -> bool:
    """Do three blocks stand for all?"""
    return isinstance(workload.spec, GPT | Llama) and workload.spec.layers > BLOCKS and not exact


def _small_program(workload: Workload, samples: int, cache: Path | None, *, exact: bool, few: bool) -> Program:
    """The folded program of `samples` samples, kept or captured.

    Raises:
        ValueError: For a user's own code on fewer samples than it will run on.
    """
    own = workload.model.startswith("python:")
    if own and samples != workload.batch // workload.accumulate:
        raise ValueError("a user's own code may do anything with its batch")
    small = Workload(
        model=workload.model if exact or workload.spec is None else type(workload.spec).kind,
        spec=workload.spec,
        batch=samples,
        dtype=workload.dtype,
        master=workload.master,
        optimizer=workload.optimizer,
        seed=workload.seed if own else 0,
        extra=workload.extra,
    )
    if isinstance(small.spec, GPT | Llama) and few:
        small = replace(small, spec=replace(small.spec, layers=BLOCKS))
    path = cache / "programs" / f"{_key(small, exact=exact)}.json" if cache and not own else None
    program = _kept(path)
    if program is None:
        capture = importlib.import_module("partita.runtime.capture")
        tasks = importlib.import_module("partita.runtime.task")
        program = fold(capture.capture(tasks.subject_of(small, synthetic=True), samples))
        _keep(path, program)
    return program


# ---- the cache
def _key(workload: Workload, *, exact: bool) -> str:
    spec = None if workload.spec is None else [type(workload.spec).kind, asdict(workload.spec)]
    own = {**asdict(workload), "spec": spec}
    config, made_by = "", [version("torch")]
    if workload.model.startswith("hf:"):
        config = Path(workload.model.removeprefix("hf:")).read_text(encoding="utf-8")
        made_by += [version("transformers")] if exact or workload.spec is None else []
    text = json.dumps([VERSION, FORMAT, made_by, exact, own, config], sort_keys=True, default=str)
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
