"""`partita estimate`: figures of a plan, without ranks or GPU."""

import argparse

import partita
from partita.cli.parser import read_plan, shared
from partita.pages import json, text


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    terms = "every term with its formula, amount, constant, source and share"
    parser.add_argument("--why", nargs="?", const="time", choices=("time",), help=terms)
    shared(parser)


def run(args: argparse.Namespace) -> int:
    plan = read_plan(args)  # before the verb is looked up: a refusal needs no torch
    got = partita.estimate(plan)
    said = got.json()
    why = [json.why_json(term) for term in got.figures.why] if args.why else []
    print(json.dumps(said | ({"why": why} if args.why else {})) if args.json else text.estimate(said, why))
    return 0
