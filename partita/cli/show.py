"""`partita show`: facts about a name, a plan or a run folder, with sources."""

import argparse
from pathlib import Path
from typing import Any

import partita
from partita.cli.facts import everything, facts_of, names, plan_facts, run_facts
from partita.cli.parser import overrides, read_plan, shared, writable
from partita.errors import Fault, Refused
from partita.pages import json, text, trace
from partita.plans import nearest


def arguments(parser: argparse.ArgumentParser) -> None:
    what = "a catalogue name, a plan file or a run folder [everything there is]"
    parser.add_argument("what", metavar="NAME|PLAN|DIR", nargs="?", help=what)
    parser.add_argument("--html", metavar="FILE", help="a report page (not available yet)")
    parser.add_argument("--trace", metavar="FILE", help="write the predicted timeline of a plan as a Chrome trace")
    shared(parser)


def run(args: argparse.Namespace) -> int:
    if args.html:
        law = "this version writes text, JSON and traces"
        raise Refused(Fault("P115", "there is no HTML page yet", law=law, cure="--json, or --trace FILE", at="--html"))
    got = _facts(args)
    if args.trace:
        _trace(args)
    print(json.dumps(got) if args.json else text.comparison_or_facts(got))
    return 0


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    overrides(args)
    if args.what is None:
        return everything()
    path = Path(args.what)
    if path.is_dir():
        return run_facts(path)
    if path.is_file() or path.suffix == ".toml":
        return plan_facts(read_plan(args, path))
    found = facts_of(args.what)
    if found is None:
        law = "show takes a name of the catalogue, a plan file or a run folder"
        close = nearest(args.what, names())
        cure = close if close.endswith("?") else "partita show lists every name"
        raise Refused(Fault("P107", f"unknown name {args.what!r}", law=law, cure=cure, at="partita show"))
    return found


def _trace(args: argparse.Namespace) -> None:
    """The predicted timeline of a plan or of a run's plan."""
    path = Path(args.what) if args.what else None
    path = path / "plan.toml" if path and path.is_dir() else path
    if path is None or not path.is_file():
        law = "a timeline is that of a plan"
        raise Refused(Fault("P119", "--trace needs a plan", law=law, cure="partita show PLAN --trace FILE", at="--trace"))
    target = writable(args.trace, "--trace")
    plan = read_plan(args, path)
    line = partita.estimate(plan).timeline()
    target.write_text(json.dumps(trace.chrome(line.spans, f"{path.name}, predicted")), encoding="utf-8")
