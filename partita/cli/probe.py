"""`partita probe`: measures this machine."""

import argparse

import partita
from partita.cli.parser import overrides, shared, writable
from partita.errors import Fault, refuse
from partita.pages import json, text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", dest="out", metavar="FILE", help="write the cluster file here [the user's cache folder]")
    parser.add_argument("--quick", action="store_true", help="20 seconds instead of 90")
    shared(parser)


def run(args: argparse.Namespace) -> int:
    law, cure = "a probe reads no plan", "leave --set out"
    refuse([Fault("P101", f"--set {k} has nothing to override", law=law, cure=cure, at="--set") for k in overrides(args)])
    if args.out:
        writable(args.out, "-o")
    said = partita.probe(out=args.out, quick=args.quick).json()
    print(json.dumps(said) if args.json else text.probe(said))
    return 0
