"""A Program as JSON, out and in.  Equal signatures are written once; nothing is ever unpickled."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from partita.program.dims import Signature
from partita.program.events import Collective, Compute, Event, Kind, Partial, Phase, Repeat, Rows, Split, Tensor
from partita.program.program import Pipeline, Program, Turn

FORMAT = 3
PLAIN = (
    "loss",
    "microbatches",
    "reduce_dtype",
    "clip",
    "dynamic",
    "calls",
    "period",
    "relaxed",
)  # fields of Program that are JSON already


def to_json(program: Program) -> str:
    """The program as one line of JSON."""
    signatures: dict[str, int] = {}
    segments = [
        [s.count, s.block, s.carried, s.part, s.when, [_event_out(e, signatures) for e in s.events]] for s in program.segments
    ]
    table = {
        "partita_program": FORMAT,
        "atoms": list(program.atoms.items()),
        "tensors": [_tensor_out(t) for t in program.tensors],
        "segments": segments,
        "signatures": [json.loads(text) for text in signatures],
        "gradients": list(program.gradients.items()),
        "classes": {name: sorted(atoms) for name, atoms in program.classes.items()},
        "sums": list(program.sums.items()),
        "axes": list(program.axes.items()),
        "notes": program.notes,
        "pipeline": _pipeline_out(program.pipeline),
        "runs": program.runs,
        **{name: getattr(program, name) for name in PLAIN},
    }
    assert {f.name for f in fields(Program)} <= set(table), "a field of Program is not written"
    return json.dumps(table, separators=(",", ":"))


def from_json(text: str) -> Program:
    """The program written by `to_json`.

    Raises:
        ValueError: If the text is no program of this format.
    """
    table = json.loads(text)
    if not isinstance(table, dict) or table.get("partita_program") != FORMAT:
        raise ValueError(f"not a program of format {FORMAT}")
    try:
        return _read(table)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"not a program of format {FORMAT}: {error!r}") from error


def _read(table: Mapping[str, Any]) -> Program:
    signatures = [_signature_in(s) for s in table["signatures"]]
    return Program(
        atoms=dict(_pairs(table["atoms"])),
        tensors=tuple(_tensor_in(i, row) for i, row in enumerate(table["tensors"])),
        segments=tuple(
            Repeat(count, tuple(_event_in(e, signatures) for e in events), block, tuple(_pairs(carried)), part, tuple(when))
            for count, block, carried, part, when, events in table["segments"]
        ),
        gradients=dict(_pairs(table["gradients"])),
        classes={name: frozenset(atoms) for name, atoms in table["classes"].items()},
        sums={a: tuple(map(tuple, parts)) for a, parts in table["sums"]},
        axes=dict(_pairs(table["axes"])),
        notes=tuple(table["notes"]),
        pipeline=_pipeline_in(table["pipeline"]),
        runs=tuple(table["runs"]),
        **{name: table[name] for name in PLAIN},
    )


def _pipeline_out(pipeline: Pipeline | None) -> list[Any] | None:
    if pipeline is None:
        return None
    return [pipeline.axis, pipeline.rank, pipeline.stages, pipeline.count, pipeline.turns, pipeline.microbatches]


def _pipeline_in(row: list[Any] | None) -> Pipeline | None:
    if row is None:
        return None
    axis, rank, stages, count, turns, microbatches = row
    return Pipeline(axis, rank, tuple(stages), count, tuple(Turn(*t) for t in turns), microbatches)


def _pairs(rows: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    return ((a, b) for a, b in rows)


# ---- tensors
def _tensor_out(t: Tensor) -> list[Any]:
    layouts = [[axis, _layout_out(x)] for axis, x in t.layouts.items()]
    row: list[Any] = [t.shape, t.dtype, t.dims, t.kind, t.name, t.root, layouts, [1] if t.host else []]
    while row and row[-1] in ("", []):  # most tensors have neither
        row.pop()
    return row


def _tensor_in(i: int, row: list[Any]) -> Tensor:
    shape, dtype, dims, kind, name, root, layouts, host = [*row, *(None,) * (8 - len(row))]
    at = {axis: _layout_in(x) for axis, x in layouts or ()}
    return Tensor(i, tuple(shape), dtype, tuple(map(tuple, dims)), Kind(kind), name or "", root, at, bool(host))


def _layout_out(x: Split | Partial | Rows) -> Any:
    if isinstance(x, Rows):
        return x.held
    return x.op if isinstance(x, Partial) else [x.dim, x.atom]


def _layout_in(x: Any) -> Split | Partial | Rows:
    if isinstance(x, bool):
        return Rows(x)
    return Partial(x) if isinstance(x, str) else Split(*x)


# ---- events
def _event_out(e: Event, signatures: dict[str, int]) -> list[Any]:
    if isinstance(e, Collective):
        return ["c", *(getattr(e, f.name) for f in fields(Collective))]
    number = -1
    if e.signature is not None:
        number = signatures.setdefault(json.dumps(_signature_out(e.signature)), len(signatures))
    return [e.op, e.module, e.phase, e.ins, e.outs, e.flop, number, int(e.view) + 2 * int(e.saves)]


def _event_in(row: list[Any], signatures: list[Signature]) -> Event:
    if row[0] == "c":
        op, axis, tensors, nbytes, dtype, phase, module, overlapped, once, keeps, values = row[1:]
        kept = None if keeps is None else tuple(keeps)
        return Collective(op, axis, tuple(tensors), nbytes, dtype, Phase(phase), module, overlapped, once, kept, values)
    op, module, phase, ins, outs, flop, number, flags = row
    signature = None if number < 0 else signatures[number]
    return Compute(op, module, Phase(phase), tuple(ins), tuple(outs), flop, signature, bool(flags & 1), bool(flags & 2))


# ---- signatures
def _signature_out(s: Signature) -> dict[str, Any]:
    out = {
        "ins": s.ins,
        "outs": s.outs,
        "whole": sorted(s.whole),
        "inner": s.inner,
        "linear": s.linear,
        "dims": s.dims,
        "parts": s.parts,
        "summands": s.summands,
        "independent": sorted(s.independent),
        "unread": sorted(s.unread),
        "creates": s.creates,
        "index": s.index + 1,
    }
    return {k: v for k, v in out.items() if v or k in ("ins", "outs")}


def _signature_in(table: Mapping[str, Any]) -> Signature:
    return Signature(
        ins=[[tuple(cell) for cell in cells] for cells in table["ins"]],
        outs=[[tuple(cell) for cell in cells] for cells in table["outs"]],
        whole=set(table.get("whole", ())),
        inner={k: tuple(v) for k, v in table.get("inner", {}).items()},
        linear=table.get("linear", "no"),
        dims={k: tuple(v) for k, v in table.get("dims", {}).items()},
        parts=table.get("parts", {}),
        summands=[tuple(d) for d in table.get("summands", ())],
        independent={(a, b) for a, b in table.get("independent", ())},
        unread=set(table.get("unread", ())),
        creates=table.get("creates", False),
        index=table.get("index", 0) - 1,
    )
