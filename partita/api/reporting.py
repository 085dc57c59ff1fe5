"""report: what an estimate, a run, a proof or a search came to, as a page of text."""

from typing import Any

from partita.api.planning import Estimate
from partita.api.probing import Probe
from partita.api.run import Run
from partita.pages import text
from partita.pages.json import choices_json
from partita.proof.prove import Proof
from partita.search import Choices


def report(result: Estimate | Run | Proof | Choices | Probe) -> str:
    """A page a person reads.

    Args:
        result: What `estimate`, `train`, `prove`, `plan` or `probe` returned.
    """
    if isinstance(result, Choices):
        return text.choices(choices_json(result))
    pages: dict[type, Any] = {Estimate: text.estimate, Run: text.run, Proof: text.proof, Probe: text.probe}
    return pages[type(result)](result.json())
