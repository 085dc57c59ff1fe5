"""`partita plan`: the best plan of a workload on a cluster."""

import argparse
from pathlib import Path

import partita
from partita.cli.parser import count, overrides, shared, size, spoken, writable
from partita.errors import refuse
from partita.pages import json, text
from partita.plans import read_workload
from partita.plans.plan import devices_of

WORKLOAD = "catalogue name, hf:PATH/config.json, python:module:factory, or a TOML file with [workload]"
CLUSTER = "here, a catalogue name such as 8x8-h100, or the path of a cluster file"
AIMS = ("time", "memory", "traffic", "energy")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workload", metavar="WORKLOAD", help=WORKLOAD)
    parser.add_argument("--on", metavar="CLUSTER", required=True, help=CLUSTER)
    parser.add_argument("--ranks", type=count, help="how many devices to use [all]")
    parser.add_argument("--batch", type=count, help="samples per optimizer step, over all ranks")
    parser.add_argument("--memory", type=size, help='bytes a device may use, e.g. "70 GiB" [what it has]')
    parser.add_argument("--minimise", choices=AIMS, default="time", help="what makes a plan best [time]")
    parser.add_argument("-o", dest="out", metavar="FILE", help="write the best plan here")
    shared(parser)


def run(args: argparse.Namespace) -> int:
    more = {"batch": str(args.batch)} if args.batch else {}
    with spoken(**({"batch": "--batch"} if args.batch else {})):
        workload = read_workload(args.workload, overrides(args) | more)
    refuse(devices_of(args.on, Path.cwd())[1])
    out = writable(args.out, "-o") if args.out else None
    choices = partita.plan(workload, on=args.on, ranks=args.ranks, memory=args.memory, minimise=args.minimise)
    if out:
        out.write_text(choices.best.to_toml(out.parent), encoding="utf-8")
    got = json.choices_json(choices)
    print(json.dumps(got) if args.json else text.choices(got) + (f"\n\n  best plan written to {out}" if out else ""))
    return 0
