"""`partita show`: facts about a name, a plan or a run folder, with sources."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import partita
from partita.cli.facts import everything, facts_of, names, plan_facts, run_facts, run_timeline
from partita.cli.parser import overrides, read_plan, shared, writable
from partita.errors import Fault, Refused
from partita.pages import json, text, trace
from partita.pages.gantt import gantt
from partita.plans import nearest
from partita.simulate import Span
from partita.strategy import pipeline_of


def arguments(parser: argparse.ArgumentParser) -> None:
    what = "a catalogue name, a plan file or a run folder [everything there is]"
    parser.add_argument("what", metavar="NAME|PLAN|DIR", nargs="?", help=what)
    parser.add_argument("--html", metavar="FILE", help="a report page (not available yet)")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline of a plan, and of its run, as a Chrome trace")
    shared(parser)


def run(args: argparse.Namespace) -> int:
    if args.html:
        law = "this version writes text, JSON and traces"
        raise Refused(Fault("P115", "there is no HTML page yet", law=law, cure="--json, or --trace FILE", at="--html"))
    got = _facts(args)
    if args.trace:
        _trace(args)
    print(json.dumps(got) if args.json else text.comparison_or_facts(got))
    if not args.json and args.what and (drawn := _drawn(args)):
        print(f"\n{drawn}")
    return 0


def _drawn(args: argparse.Namespace) -> str:
    """A small picture of the schedule, if what is shown is a plan with a pipeline."""
    path = Path(args.what)
    if not (path.is_file() or path.suffix == ".toml"):
        return ""
    plan = read_plan(args, path)
    if plan.workload is None or pipeline_of(plan.strategies, plan.mesh) is None:
        return ""
    played = partita.estimate(plan).played()
    assert played is not None, "a plan with a pipeline plays a schedule"
    size = shutil.get_terminal_size()
    return gantt(played.schedule, played.table, size.columns, colour=sys.stdout.isatty())


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
    """The predicted timeline of a plan; of a run folder, the measured one beside it."""
    path = Path(args.what) if args.what else None
    path = path / "plan.toml" if path and path.is_dir() else path
    if path is None or not path.is_file():
        law = "a timeline is that of a plan"
        raise Refused(Fault("P119", "--trace needs a plan", law=law, cure="partita show PLAN --trace FILE", at="--trace"))
    target = writable(args.trace, "--trace")
    predicted = partita.estimate(read_plan(args, path)).spans()
    target.write_text(json.dumps(trace.trace(predicted, _measured(path.parent))), encoding="utf-8")


def _measured(folder: Path) -> dict[int, list[Span]]:
    """The timeline a run left beside its plan; empty if there is none."""
    found = run_timeline(folder)
    return {
        rank: [Span(name, "compute", phase, "", start, end) for name, phase, start, end in marks]
        for rank, marks in found.items()
    }
