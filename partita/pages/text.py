"""Pages a person reads: plain text made from the JSON objects of the contract, with human units."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partita.units import format_bytes, format_count, format_time

Json = Mapping[str, Any]


def table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), *, indent: int = 2) -> str:
    """Aligned columns; a column whose cells are all numbers or units stands to the right.

    Example:
        >>> print(table([["time", "12 ms"], ["memory", "1.5 GiB"]], ["", "predicted"]))
                  predicted
          time        12 ms
          memory    1.5 GiB
    """
    cells = [list(map(str, row)) for row in rows]
    if not cells:
        return ""
    every = [list(header), *cells] if header else cells
    columns = max(map(len, every))
    every = [row + [""] * (columns - len(row)) for row in every]
    widths = [max(len(row[i]) for row in every) for i in range(columns)]
    body = every[1:] if header else every
    right = [all(_is_number(row[i]) for row in body) for i in range(columns)]
    lines = ("  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)) for row in every)
    return "\n".join((" " * indent + line).rstrip() for line in lines)


def percent(share: float | None) -> str:
    """A share with its sign: 0.031 -> "+3.1 %"."""
    if share is None or not math.isfinite(share):
        return "-"
    return "0" if share == 0 else f"{100 * share:+.1f} %"


def estimate(got: Json, why: Sequence[Json] = ()) -> str:
    """The page of an `estimate` object; `why` adds the terms of the time."""
    low, high = got["step_seconds_band"]
    rows = [
        ["step time", format_time(got["step_seconds"]), f"{format_time(low)} to {format_time(high)}"],
        ["samples per second", format_count(got["samples_per_second"] or 0), ""],
    ]
    if got.get("tokens_per_second") is not None:
        rows.append(["tokens per second", format_count(got["tokens_per_second"]), ""])
    rows.append(
        ["flop/s per device", format_count(got["flop_per_second_per_device"] or 0), _share(got.get("mfu"), "of its peak")]
    )
    rows.append(["exposed communication", format_time(got["exposed_communication_seconds"]), ""])
    if got["bubble_fraction"]:
        rows.append(["bubble", f"{100 * got['bubble_fraction']:.3g} %", ""])
    verdict = "fits" if got["fits"] else "does not fit"
    rows.append(["peak memory", format_bytes(got["memory_bytes"]["peak"]), verdict])
    if got.get("energy_joules") is not None:
        rows.append(["energy", f"{format_count(got['energy_joules'])}J", ""])
    parts = [table(rows), _memory(got["memory_bytes"], got.get("peak_at", "")), _traffic(got["traffic"])]
    if why:
        parts.append(_why(why, got["step_seconds"]))
    parts.append(_notes(got.get("notes", ())))
    return "\n\n".join(p for p in parts if p)


def comparison(got: Json) -> str:
    """The table predicted | measured | error of a `train` object."""
    predicted, error = got["predicted"], got["error"]
    measured_bytes = (got.get("memory_bytes") or {}).get("peak")
    rows = [
        ["step time", format_time(predicted["step_seconds"]), _time(got.get("step_seconds")), percent(error.get("time"))],
        ["peak memory", format_bytes(predicted["memory_bytes"]["peak"]), _size(measured_bytes), percent(error.get("memory"))],
        ["traffic", _moved(predicted["traffic"]), _moved(got.get("traffic", [])), percent(error.get("traffic"))],
    ]
    return table(rows, ["", "predicted", "measured", "error"])


def run(got: Json) -> str:
    """The page of a `train` object."""
    losses = got.get("losses") or []
    parts = []
    if losses:
        span = f"{losses[0]:.4f} -> {losses[-1]:.4f}" if len(losses) > 1 else f"{losses[0]:.4f}"
        held = f"   held-out {got['held_out_loss']:.4f}" if got.get("held_out_loss") is not None else ""
        parts.append(f"  {got['steps']} steps   loss {span}{held}")
    if got.get("sample"):
        parts.append("  a sample of what it learned\n\n" + "\n".join(f"  | {line}" for line in str(got["sample"]).splitlines()))
    if got.get("error"):
        parts.append(comparison(got))
    parts.append(_notes(got.get("notes", ())))
    if got.get("run_dir"):
        parts.append(f"  {got['run_dir']}")
    return "\n\n".join(p for p in parts if p)


def proof(got: Json) -> str:
    """The page of a `prove` object."""
    square, numerics, traffic, memory = (got.get(k) or {} for k in ("square", "numerics", "traffic", "memory"))
    worst = f" at {numerics['worst_tensor']}" if numerics.get("worst_tensor") else ""
    wire = (
        "no payload of 1 MB to judge the wire by"
        if traffic.get("wire_error") is None
        else f"wire {percent(traffic['wire_error'])}"
    )
    peak = "below 100 MiB: not judged" if memory.get("error") is None else f"error {percent(memory['error'])}"
    rows = [
        ["square", _held(square.get("equal")), f"said {square.get('said')} calls, heard {square.get('heard')}"],
        ["numerics", _held(_within(numerics)), f"{_exp(numerics)}, bound {numerics.get('bound')}{worst}"],
        ["traffic", _held(traffic.get("algorithmic_equal")), wire],
        ["memory", "NO" if "memory" in got.get("differs", ()) else "", peak],
    ]
    rows += [[f"invariant {i['name']}", _held(i["held"]), ""] for i in got.get("invariants") or ()]
    differs = f"   differs in {', '.join(got['differs'])}" if got.get("differs") else ""
    parts = [f"  {'proved' if got['proved'] else 'NOT proved'}   promise {got['promise']}{differs}", table(rows)]
    if square.get("first_difference"):
        parts.append(_difference(square["first_difference"]))
    parts.append("\n".join(f"  {why}" for why in got.get("reasons") or () if not why.startswith("square")))
    if got.get("shrunk"):
        parts.append("  shrunk: " + "; ".join(map(str, got["shrunk"])))
    parts.append(_notes(got.get("notes", ())))
    return "\n\n".join(p for p in parts if p)


def _difference(where: Json) -> str:
    """The first call that was not as said."""
    fields = f": {', '.join(where['fields'])}" if where.get("fields") else ""
    at = f"  first difference: rank {where['rank']}, call {where['index']} on {where['axis']}{fields}"
    said, heard = (_call(where[side]) for side in ("said", "heard"))
    return f"{at}\n    said   {said}\n    heard  {heard}"


def _call(call: Json | None) -> str:
    return f"{call['op']} on {call['axis']} of {call['nbytes']} bytes {call['dtype']}" if call else "nothing"


def matrix(rows: Sequence[Json]) -> str:
    """Proofs side by side: what each row of a proof matrix came to.

    Args:
        rows: {strategies, workload, mesh, seconds, proof: a `prove` object or None, error: why there is none}.
    """
    cells = []
    for row in rows:
        got = row.get("proof")
        verdict = "refused" if got is None else "proved" if got["proved"] else f"NOT: {', '.join(got['differs'])}"
        error, calls = (_exp(got["numerics"])[14:], str(got["square"]["said"])) if got else (row.get("error", ""), "")
        cells.append([row["strategies"], row["workload"], row["mesh"], verdict, error, calls, format_time(row["seconds"])])
    return table(cells, ["strategies", "workload", "mesh", "verdict", "largest error", "calls", "time"])


def choices(got: Json) -> str:
    """The page of a `plan` object."""
    rows = [
        [str(p["place"]), p.get("family", ""), format_time(p["step_seconds"]), format_bytes(_peak(p["memory_bytes"]))]
        for p in got["plans"][:5]
    ]
    lines = [table(rows, ["", "plan", "step time", "peak memory"])]
    if got["rejected"]:
        lines.append("  why the others lost\n" + table([[r["family"], r["reason"]] for r in got["rejected"][:12]], indent=4))
        if len(got["rejected"]) > 12:
            lines.append(f"    and {len(got['rejected']) - 12} more: --json lists them")
    bound = f"no plan is faster than {format_time(got['lower_bound_seconds'])} (gap {percent(got['gap'])})"
    lines.append(f"  {got['candidates']} candidates in {format_time(got['search_seconds'])}; {bound}")
    return "\n\n".join(lines)


def probe(got: Json) -> str:
    """The page of a `probe` object: what was measured, and the residuals of what was kept out."""
    rows = [[name, percent(value).lstrip("+")] for name, value in (got.get("residuals") or {}).items()]
    parts = [table(rows, ["class", "median held-out error"]), _notes(got.get("notes", ()))]
    if got.get("path"):
        parts.append(f"  {got['path']}")
    return "\n\n".join(p for p in parts if p)


def comparison_or_facts(got: Json) -> str:
    """A finished run's page, else the facts."""
    return run(got) if got.get("error") and got.get("predicted") else facts(got)


def facts(got: Json) -> str:
    """Nested facts as indented lines; a list of rows with the same keys is a table."""
    return "\n".join(_facts(got, 2))


def _facts(got: Json, indent: int) -> list[str]:
    pad, lines = " " * indent, []
    width = max((len(str(k)) for k, v in got.items() if not isinstance(v, Mapping | list)), default=0)
    for key, value in got.items():
        if isinstance(value, Mapping):
            lines += [f"{pad}{key}", *_facts(value, indent + 2)]
        elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            header = list(dict.fromkeys(k for row in value for k in row))
            rows = [[_cell(row.get(k)) for k in header] for row in value]
            lines += [f"{pad}{key}", table(rows, header, indent=indent + 2)]
        elif isinstance(value, str) and "\n" in value:
            lines += [f"{pad}{key}", *(f"{pad}  {line}".rstrip() for line in value.splitlines())]
        elif isinstance(value, list) and any(len(str(v)) > 40 for v in value):
            lines += [f"{pad}{key}", *(f"{pad}  {v}" for v in value)]
        else:
            lines.append(f"{pad}{key!s:<{width}}  {_cell(value)}".rstrip())
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _memory(memory: Json, at: str) -> str:
    rows = [[part, format_bytes(size)] for part, size in memory.items() if part != "peak" and size]
    where = f" (at {at})" if at else ""
    return f"  memory at the peak{where}\n{table(rows, indent=4)}" if rows else ""


def _traffic(traffic: Sequence[Json]) -> str:
    if not traffic:
        return "  traffic: none"
    rows = [
        [t["axis"], t["op"], f"{t['count']:g}", format_bytes(t["bytes"]), format_bytes(t["backend_bytes"])] for t in traffic
    ]
    return f"  traffic of a rank in one step\n{table(rows, ['axis', 'op', 'calls', 'bytes', 'backend sends'], indent=4)}"


def _why(why: Sequence[Json], total: float) -> str:
    rows = []
    for term in why:
        share = f"{100 * term['seconds'] / total:.1f} %" if total else "-"
        rows.append(
            [
                share,
                format_time(term["seconds"]),
                term["term"],
                term["amount"],
                term["formula"],
                term["constant"],
                term["source"],
            ]
        )
    return f"  why time\n{table(rows, ['share', 'time', 'term', 'amount', 'formula', 'constant', 'source'], indent=4)}"


def _notes(notes: Sequence[str]) -> str:
    return "\n".join(f"  note: {note}" for note in notes)


def _moved(traffic: Sequence[Json]) -> str:
    return f"{format_bytes(sum(t['bytes'] for t in traffic))} in {sum(t['count'] for t in traffic):g} calls"


def _peak(memory: Any) -> float:
    return memory["peak"] if isinstance(memory, Mapping) else memory


def _share(share: float | None, of: str) -> str:
    return f"{100 * share:.1f} % {of}" if share is not None else ""


def _time(seconds: float | None) -> str:
    return "not measured" if seconds is None else format_time(seconds)


def _size(size: float | None) -> str:
    return "not measured" if size is None else format_bytes(size)


def _held(held: Any) -> str:
    return {True: "yes", False: "NO", None: "not measured"}[held]


def _within(numerics: Json) -> bool | None:
    error, bound = numerics.get("max_relative_error"), numerics.get("bound")
    return None if error is None or bound is None else error <= bound


def _exp(numerics: Json) -> str:
    error = numerics.get("max_relative_error")
    return "not measured" if error is None else f"largest error {error:.2g}"


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or (cell[0] in "+-" and (len(cell) == 1 or cell[1].isdigit()))
