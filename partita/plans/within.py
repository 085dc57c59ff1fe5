"""What must hold between the fields of one workload, each right by itself."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from partita.errors import Fault
from partita.plans.fields import HALF, nearest
from partita.plans.numbers import divisors, listed
from partita.workload import GPT, Llama, Workload

WINDOWS = 4  # of sequence + 1 bytes, the least a text must hold
Rule = Callable[[Workload, Mapping[str, Any]], Fault | None]


def workload_faults(
    workload: Workload,
    at: str,
    *,
    config: Mapping[str, Any] | None = None,
    bad: frozenset[str] = frozenset(),
    data: bool = True,
) -> list[Fault]:
    """Every broken rule whose inputs could be read.

    Args:
        workload: As far as it could be read.
        at: Place of its table.
        config: That of an `hf:` model.
        bad: Fields that could not be read.
        data: Whether the rules about data count; a proof brings its own batches.
    """
    rules = RULES + DATA_RULES if data else RULES
    found = (rule(workload, config or {}) for inputs, rule in rules if not bad & set(inputs))
    return [replace(fault, at=f"{at}.{fault.at}") for fault in found if fault]


def heads_divide(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    spec = workload.spec
    if not isinstance(spec, GPT | Llama) or spec.hidden % spec.heads == 0:
        return None
    return Fault(
        "P104",
        f"{spec.heads} heads do not divide hidden = {spec.hidden}",
        have=f"hidden = {spec.hidden}, heads = {spec.heads}",
        law="every head has the same width, hidden / heads",
        cure=f"heads = {listed(divisors(spec.hidden))}",
        at="heads",
    )


def heads_turn(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    spec = workload.spec
    if not isinstance(spec, Llama) or spec.hidden % spec.heads or spec.hidden // spec.heads % 2 == 0:
        return None
    good = [d for d in divisors(spec.hidden) if spec.hidden // d % 2 == 0]
    return Fault(
        "P104",
        f"heads of odd width {spec.hidden // spec.heads} cannot be rotated",
        have=f"hidden = {spec.hidden}, heads = {spec.heads}",
        law="rotary positions turn pairs of numbers, so hidden / heads must be even",
        cure=f"heads = {listed(good)}" if good else "an even hidden",
        at="heads",
    )


def keys_divide(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    spec = workload.spec
    if not isinstance(spec, Llama) or spec.heads % spec.key_heads == 0:
        return None
    return Fault(
        "P104",
        f"kv_heads = {spec.key_heads} does not divide heads = {spec.heads}",
        have=f"heads = {spec.heads}, kv_heads = {spec.key_heads}",
        law="every key head serves the same number of heads",
        cure=f"kv_heads = {listed(divisors(spec.heads))}",
        at="kv_heads",
    )


def positions_suffice(workload: Workload, config: Mapping[str, Any]) -> Fault | None:
    """GPT-2's positions are a learned table: a longer sequence has no rows in it."""
    positions = config.get("n_positions", 1024) if config.get("model_type") == "gpt2" else None
    if positions is None or not workload.sequence or workload.sequence <= positions:
        return None
    return Fault(
        "P112",
        f"sequence = {workload.sequence} is longer than the model's positions",
        have=f"sequence = {workload.sequence}, n_positions = {positions}",
        law="each position has a learned row in the model",
        cure=f"sequence = {positions} or less",
        at="sequence",
    )


def schedule_ends(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    if workload.schedule != "cosine" or workload.horizon is not None:
        return None
    return Fault(
        "P119",
        "a cosine schedule has no horizon",
        law="the rate falls over horizon steps; --steps never changes the schedule",
        cure="horizon = the number of steps you mean to train",
        at="horizon",
    )


def warmup_ends(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    if workload.horizon is None or workload.warmup < workload.horizon:
        return None
    return Fault(
        "P112",
        "warmup leaves no step to learn",
        have=f"warmup = {workload.warmup}, horizon = {workload.horizon}",
        law="the rate rises for warmup steps and then follows the schedule until horizon",
        cure=f"warmup = {workload.horizon - 1} or less",
        at="warmup",
    )


def master_is_wider(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    if workload.master is None or (workload.dtype in HALF and workload.master not in HALF):
        return None
    return Fault(
        "P112",
        f"master = {workload.master!r} beside dtype = {workload.dtype!r}",
        have=f"dtype = {workload.dtype!r}, master = {workload.master!r}",
        law="a master copy keeps what a half type rounds away",
        cure="leave master out, or dtype = " + " or ".join(map(repr, HALF)) + ' with master = "float32"',
        at="master",
    )


def bytes_fit(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    spec = workload.spec
    if not isinstance(spec, GPT | Llama) or spec.vocab >= 256:
        return None
    return Fault(
        "P112",
        f"vocab = {spec.vocab} is too small for bytes",
        have=f"vocab = {spec.vocab}, a byte has 256 values",
        law="text is read as bytes: that of data, or the standard library's own source",
        cure="vocab = 256 or more",
        at="vocab",
    )


def data_is_read(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    if workload.data is None or workload.spec is None or isinstance(workload.spec, GPT | Llama):
        return None
    return Fault(
        "P115",
        f"model {workload.model!r} reads no data",
        have=f"data = {workload.data!r}",
        law="a model without tokens trains on seeded synthetic samples",
        cure="leave data out, or a token model: gpt, llama",
        at="data",
    )


def data_exists(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    path = Path(workload.data) if workload.data else None
    if path is None or path.exists():
        return None
    here = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(path.name, here)
    return Fault(
        "P108",
        f"data {str(path)!r} does not exist",
        law="data is a text file or a folder of them, relative to the plan file",
        cure=close if close.endswith("?") else "a file or folder that exists",
        at="data",
    )


def data_is_readable(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    path = Path(workload.data) if workload.data else None
    if path is None or not path.exists():
        return None
    cure = "a text file or a folder of them that this user may read"
    if not (path.is_file() or path.is_dir()):
        return Fault("P109", f"data {str(path)!r} is neither a file nor a folder", cure=cure, at="data")
    try:
        first = next(files(path), None)
        if first:
            with first.open("rb") as stream:
                stream.read(1)
    except OSError as error:
        return Fault("P109", f"data {str(path)!r} cannot be read", have=str(error.strerror), cure=cure, at="data")
    return None


def data_suffices(workload: Workload, _: Mapping[str, Any]) -> Fault | None:
    """Room for windows of sequence + 1 bytes, in the training and in the held-out text."""
    path = Path(workload.data) if workload.data else None
    if path is None or not (path.is_file() or path.is_dir()):
        return None
    need, size = WINDOWS * ((workload.sequence or 0) + 1), 0
    for file in files(path):
        size += file.stat().st_size
        if size >= need:
            return None
    law = f"training and held-out text take at least {WINDOWS} windows of sequence + 1 bytes"
    if size == 0:
        cure = "a file with text, or a folder with such files"
        return Fault("P110", f"data {str(path)!r} is empty", "0 bytes", law, cure, "data")
    have = f"{size} bytes, sequence = {workload.sequence}"
    longest = size // WINDOWS - 1
    cure = f"at least {need} bytes" + (f", or sequence = {longest} or less" if longest > 0 else "")
    return Fault("P110", f"data {str(path)!r} is too short", have, law, cure, "data")


def files(path: Path) -> Iterator[Path]:
    """The regular files of a file or folder that are not hidden."""
    if path.is_file():
        yield path
    else:
        yield from (p for p in path.rglob("*") if p.is_file() and not any(q.startswith(".") for q in p.relative_to(path).parts))


RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("hidden", "heads"), heads_divide),
    (("hidden", "heads"), heads_turn),
    (("heads", "kv_heads"), keys_divide),
    (("sequence",), positions_suffice),
    (("schedule", "horizon"), schedule_ends),
    (("warmup", "horizon"), warmup_ends),
    (("dtype", "master"), master_is_wider),
)

DATA_RULES: tuple[tuple[tuple[str, ...], Rule], ...] = (
    (("vocab",), bytes_fit),
    (("data",), data_is_read),
    (("data",), data_exists),
    (("data",), data_is_readable),
    (("data", "sequence"), data_suffices),
)
