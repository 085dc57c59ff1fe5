"""The door: finds the command, runs it, and turns what went wrong into one message and an exit code.

0 done   1 the run failed, or a proof found a difference   2 the input was refused   130 after Ctrl-C
"""

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from partita import __version__
from partita.cli.parser import Parser
from partita.errors import Fault, Refused, RunFailed
from partita.plans import nearest
from partita.runtime.launch import first_rank

COMMANDS = {
    "plan": "find the best plan of a workload on a cluster, and say why the others lost",
    "estimate": "predict time, memory and traffic of a plan, without ranks or GPU",
    "train": "train; without a plan: a small GPT on this machine, split as planned for it",
    "prove": "prove on a shrunken copy that the split run equals one device and moves what was said",
    "show": "facts about a name, a plan or a run, with sources; without a name: everything there is",
    "probe": "measure this machine, so that predictions for it hold",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    try:
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except Refused as refused:
        print(refused, file=sys.stderr)
        return 2
    except RunFailed as failed:
        print(f"{type(failed).__name__}: {failed}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stopped:
        if first_rank():  # torchrun interrupts every rank
            print(str(stopped) or "interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _run(argv: list[str]) -> int:
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = Parser(prog="partita", description="Plan, predict, run and prove any parallel training, from one description.")
    parser.add_argument("--version", action="version", version=f"partita {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, line in COMMANDS.items():
        commands.add_parser(name, help=line, description=f"{line[0].upper()}{line[1:]}.", add_help=False)
    if chosen is not None and chosen not in COMMANDS:
        law = "a command is one of " + ", ".join(COMMANDS)
        cure = nearest(chosen, COMMANDS)
        raise Refused(Fault("P107", f"unknown command {chosen!r}", law=law, cure=cure, at=f"partita {chosen}"))
    if chosen is None:
        try:
            parser.parse_args(argv)
        except SystemExit as done:  # --help and --version have printed
            return int(done.code or 0)
        raise Refused(Fault("P119", "no command is named", law="partita COMMAND", cure=", ".join(COMMANDS), at="partita"))
    sys.path.append(str(Path.cwd()))  # for a user's `python:` module; last, so that it shadows nothing
    command = importlib.import_module(f"partita.cli.{chosen}")
    own = Parser(prog=f"partita {chosen}", description=f"{COMMANDS[chosen][0].upper()}{COMMANDS[chosen][1:]}.")
    command.arguments(own)
    argv.remove(chosen)
    try:
        args = own.read(argv)
    except SystemExit as done:
        return int(done.code or 0)
    return command.run(args)


if __name__ == "__main__":
    sys.exit(main())
