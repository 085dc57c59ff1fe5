"""A text of the user's own as a setting of a strategy: a plan file names it by its path, or holds it whole."""

from dataclasses import dataclass, field
from pathlib import Path

from partita.errors import Fault, Refused

LAW = "a text file is UTF-8"


@dataclass(frozen=True)
class TextFile:
    """What stands in a text file.

    Two of the same text are the same setting, wherever they were read: so a plan is written with the text itself, and goes on
    meaning the same when the file is edited or the plan is moved.

    Args:
        text: All of it.
        name: Of the file, for messages.
    """

    text: str
    name: str = field(default="text", compare=False)

    @classmethod
    def read(cls, path: str | Path) -> "TextFile":
        """The text of a file.

        Raises:
            Refused: P108, P109: there is none, or it cannot be read.
        """
        path = Path(path)
        if not path.exists():
            here = sorted(p.name for p in path.parent.iterdir() if p.suffix == ".txt") if path.parent.is_dir() else []
            cure = " or ".join(map(repr, here[:6])) or "the path of a text file"
            raise Refused(Fault("P108", f"file {str(path)!r} does not exist", law=LAW, cure=cure))
        cure = "a text file that this user may read"
        if not path.is_file():
            raise Refused(Fault("P109", f"{str(path)!r} is no file", law=LAW, cure=cure))
        try:
            return cls(path.read_text(encoding="utf-8-sig"), path.name)
        except UnicodeDecodeError as error:
            have = f"byte {error.object[error.start]:#04x} at {error.start}"
            raise Refused(Fault("P109", f"file {str(path)!r} is not UTF-8", have, LAW, "save it as UTF-8")) from None
        except OSError as error:
            raise Refused(Fault("P109", f"file {str(path)!r} cannot be read", str(error.strerror), LAW, cure)) from None

    @property
    def lines(self) -> str:
        """The text as a plan file holds it: its line ends tell it from a path."""
        return self.text if "\n" in self.text else f"{self.text}\n"
