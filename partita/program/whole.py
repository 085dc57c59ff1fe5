"""Which dims can be split as wanted, and which stay whole, with the reason."""

from collections.abc import Callable, Set

from partita.program.derivation import Derivation
from partita.program.program import Program
from partita.program.tensor import obstacles

NAMES = ("heads", "kv", "ffn", "hidden", "vocab")


def settled(
    program: Program, atoms: Set[int], derive: Callable[[Set[int]], Derivation], name: str
) -> tuple[Derivation, Set[int], list[str]]:
    """The derivation over as many of the atoms as calls replayed on shards can split.

    Args:
        program: What is split.
        atoms: Wanted.
        derive: The derivation over some of them.
        name: Of the strategy, for the notes.

    Returns:
        The derivation, the atoms it is over, and a note for each that stays whole.
    """
    notes: list[str] = []
    while True:
        derivation = derive(atoms)
        stuck = obstacles(program, derivation)
        if not atoms or not stuck:
            return derivation, atoms, list(dict.fromkeys(notes))
        notes += [f"{name}: {named(program, a)} stays whole: {why}" for a, why in stuck.items()]
        atoms = atoms - set(stuck)


def named(program: Program, atom: int) -> str:
    """A dim by name, and a parameter that has it."""
    name = next((n for n in NAMES if atom in program.classes.get(n, ())), "a dim")
    owner = next((t.name for t in program.parameters() if any(atom in d for d in t.dims)), "")
    return f"{name} of {owner or 'the model'!r}"
