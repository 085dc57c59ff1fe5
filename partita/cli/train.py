"""`partita train`: trains, and says predicted | measured | error."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import partita
from partita.cli.bar import Bar, progress
from partita.cli.parser import count, overrides, quoted, read_plan, shared, spoken
from partita.errors import Fault, refuse
from partita.pages import json, text
from partita.plans import Plan, read_workload
from partita.runtime.launch import ranks_from_environment


def arguments(parser: argparse.ArgumentParser) -> None:
    plan = "a plan file [a small GPT on this machine, with a planned split]"
    data = "a text file or a folder of them [the standard library's own source text]"
    parser.add_argument("plan", metavar="PLAN", nargs="?", help=plan)
    parser.add_argument("--data", metavar="PATH", help=data)
    parser.add_argument("--steps", type=count, help="optimizer steps in all; a resumed run goes on to this step")
    parser.add_argument("-o", dest="out", metavar="DIR", help="the run folder; must not exist, or be empty")
    parser.add_argument("--resume", metavar="DIR", help="go on from the last checkpoint of this run folder")
    parser.add_argument("--from", dest="start", metavar="FILE", help="start from this model.safetensors, or a folder with one")
    parser.add_argument(
        "--restart", type=count, default=0, metavar="N", help="go on by itself after a lost rank, up to N times"
    )
    parser.add_argument("--shrink", action="store_true", help="with --restart: on fewer data ranks at once")
    parser.add_argument("--save-every", type=count, metavar="K", help="write a checkpoint every K steps")
    parser.add_argument("--eval-every", type=count, metavar="K", help="measure the held-out loss every K steps")
    parser.add_argument("--dry-run", action="store_true", help="print the prediction and what would be done; start no rank")
    shared(parser)


def run(args: argparse.Namespace) -> int:
    refuse([*_out_faults(args.out), *_resume_faults(args.resume), *_shrink_faults(args)])
    plan = _plan(args)
    show = None if args.json else progress()
    try:
        got = partita.train(
            plan, data=_data(args), steps=args.steps, out=args.out, resume=args.resume, start=args.start,
            restarts=args.restart, shrink=args.shrink, save_every=args.save_every, eval_every=args.eval_every,
            dry_run=args.dry_run, progress=lambda line: _show(show, line),
        )  # fmt: skip
    finally:
        if show:
            show.close()
    said = got.json()
    if not got.speaks:
        return 0
    print(json.dumps(said) if args.json else text.run(said))
    return 0


def _show(bar: Bar | None, line: Mapping[str, Any]) -> None:
    """A step moves the bar, if there is one; a notice is for whoever reads, terminal or not."""
    if "notice" in line:
        print(line["notice"], file=sys.stderr, flush=True)
    elif bar:
        bar(line)


def _plan(args: argparse.Namespace) -> Plan | None:
    """The plan to train: the file, or the one the resumed folder holds, or None for the main job."""
    path = _data(args)
    data = {"data": quoted(path)} if path else {}
    with spoken(**({"data": "--data"} if path else {})):
        if args.plan:
            return read_plan(args, **data)
        if args.resume:
            return read_plan(args, Path(args.resume) / "plan.toml", **data)
        read_workload("gpt", overrides(args) | data)  # a wrong --data is refused before torch is loaded
    return None


def _data(args: argparse.Namespace) -> str | None:
    return str(Path(args.data).expanduser().resolve()) if args.data else None


def _out_faults(out: str | None) -> list[Fault]:
    path = Path(out) if out else None
    launched = ranks_from_environment()
    if launched is not None and launched.rank:  # the first of torchrun's ranks looks, and may have made it by now
        return []
    if path is None or not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return []
    have = f"{len(list(path.iterdir()))} entries" if path.is_dir() else "a file"
    law = "a run never writes over another; an empty folder is fine"
    cure = f"another folder, or --resume {out}" if (path / "plan.toml").exists() else "another folder"
    return [Fault("P113", f"{out!r} is in use", have, law, cure, "-o")]


def _shrink_faults(args: argparse.Namespace) -> list[Fault]:
    if not args.shrink or args.restart:
        return []
    return [Fault("P119", "--shrink needs --restart", law="it says how to restart", cure="--restart 1 --shrink", at="--shrink")]


def _resume_faults(resume: str | None) -> list[Fault]:
    path = Path(resume) if resume else None
    if path is None or (path / "plan.toml").is_file():
        return []
    what = f"{resume!r} is no run folder" if path.exists() else f"{resume!r} does not exist"
    law = "a run folder holds plan.toml and checkpoints/"
    return [Fault("P108", what, law=law, cure="the folder that -o named", at="--resume")]
