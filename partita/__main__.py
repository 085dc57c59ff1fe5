"""`python -m partita`, as torchrun starts it."""

from partita.cli.main import entry

entry()
