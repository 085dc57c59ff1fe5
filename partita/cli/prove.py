"""`partita prove`: square, numerics, traffic and memory on a shrunken copy."""

import argparse

import partita
from partita.cli.parser import count, read_plan, shared
from partita.pages import json, text
from partita.runtime.launch import first_rank


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", metavar="PLAN", help="a plan file")
    parser.add_argument("--ranks", type=count, help="ranks of the copy [the smallest mesh that keeps every axis]")
    shared(parser)


def run(args: argparse.Namespace) -> int:
    plan = read_plan(args)  # before the verb is looked up: a refusal needs no torch
    got = partita.prove(plan, ranks=args.ranks)
    if first_rank():
        said = got.json()
        print(json.dumps(said) if args.json else text.proof(said))
    return 0 if got.proved else 1
