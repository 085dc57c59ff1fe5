"""An argument parser whose refusals have the five slots, and the arguments commands share."""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from partita.errors import Fault, Refused
from partita.plans import Plan, load, nearest
from partita.strategies import GARDEN
from partita.units import parse_bytes


class Parser(argparse.ArgumentParser):
    """Argparse, except that what it refuses is a `Refused`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """The arguments; an unknown option is said before a missing argument."""
        known = [option for action in self._actions for option in action.option_strings]
        for word in words:
            if word.startswith("--") and word.split("=")[0] not in (*known, "--"):
                self.error(f"unrecognized arguments: {word}")
        return self.parse_args(words)

    def error(self, message: str) -> NoReturn:
        raise Refused(self._fault(message))

    def _fault(self, message: str) -> Fault:
        options = [option for action in self._actions for option in action.option_strings]
        law = self.format_usage().replace("usage: ", "").strip()
        law = re.sub(r"\s+", " ", law)
        if match := re.match(r"unrecognized arguments: (.*)", message):
            word = match[1].split()[0]
            known = nearest(word.split("=")[0], options) if word.startswith("-") else f"options: {', '.join(options)}"
            return Fault("P101", f"unknown argument {word!r}", law=law, cure=known, at=self.prog)
        if match := re.match(r"the following arguments are required: (.*)", message):
            return Fault("P119", f"{match[1]} is missing", law=law, cure=f"{self.prog} {match[1]}", at=self.prog)
        if match := re.match(r"argument (\S+): (.*)", message):
            option = match[1].split("/")[-1]
            choice = re.match(r"invalid choice: (.*) \(choose from (.*)\)", match[2])
            if choice:
                return Fault("P107", f"unknown {option} {choice[1]}", law=law, cure=choice[2].replace("'", ""), at=option)
            return Fault("P112", f"{option}: {match[2]}", law=law, cure=f"{self.prog} --help", at=option)
        return Fault("P112", message, law=law, cure=f"{self.prog} --help", at=self.prog)


def shared(parser: argparse.ArgumentParser) -> None:
    """The options of every verb."""
    what = "override a key of the plan"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets", help=what)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else there")


def overrides(args: argparse.Namespace) -> dict[str, str]:
    """The pairs of --set.

    Raises:
        Refused: For each that is no pair.
    """
    pairs = [text.partition("=") for text in args.sets]
    wrong = [key for key, equals, _ in pairs if not equals or not key.strip()]
    if wrong:
        law = "--set overrides one key"
        raise Refused(*(Fault("P112", f"{w!r} is no KEY=VALUE", law=law, cure="--set batch=64", at="--set") for w in wrong))
    return {key.strip(): value.strip() for key, _, value in pairs}


def read_plan(args: argparse.Namespace, path: str | Path | None = None, **more: str) -> Plan:
    """The plan file a command names, with its overrides; read here so that a refusal needs no torch."""
    return load(path or args.plan, overrides(args) | more, strategies=GARDEN)


def quoted(text: str) -> str:
    """A text as a TOML string, so that --set reads it as one whatever is in it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@contextmanager
def spoken(**options: str) -> Iterator[None]:
    """Blames what an option wrote into the plan on that option: data="--data"."""
    try:
        yield
    except Refused as refused:
        places = {f"--set {key}": option for key, option in options.items()}
        raise Refused(*(replace(f, at=places.get(f.at, f.at)) for f in refused.faults)) from None


def count(text: str) -> int:
    """An argument that is a count of at least 1."""
    return _number(text, 1, "a whole number of at least 1")


def size(text: str) -> int:
    """An argument that is a size in bytes, e.g. 70 GiB."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str, least: int, words: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not {words}")
    return int(text)


def writable(path: str, option: str) -> Path:
    """A file that can be written: its folder exists, and it is no folder itself.

    Raises:
        Refused: If not.
    """
    target = Path(path)
    if target.is_dir():
        cure = str(target / "plan.toml")
        raise Refused(Fault("P109", f"{path!r} is a folder", law=f"{option} names a file", cure=cure, at=option))
    if not target.parent.is_dir():
        law = f"{option} writes into a folder that exists"
        raise Refused(Fault("P108", f"folder {str(target.parent)!r} does not exist", law=law, cure="make it first", at=option))
    return target
