"""Which formulation suits a problem, by shape, sparsity and penalty; each choice gives its reason.

many samples, few features      newton        one d x d matrix a step, whatever the loss; with an L1 penalty `gram`, the same
by coordinates an L1 penalty, more features    working_set   primal coordinates well conditioned, many features dual
dual coordinates: an epoch reads the data once otherwise                       cg            Newton's direction by conjugate
gradients
"""

from dataclasses import dataclass

from partita.linear.losses import LOGISTIC, POISSON, SQUARED, SQUARED_EPSILON, SQUARED_HINGE
from partita.linear.problem import KINKED

FACTORED = 256  # features up to which a d x d matrix is always cheap
FLOP = 2e9  # of a Newton step, beyond which other forms win on more features than that
STEEP = 10.0  # c |x|^2 f'' / l2 from which an epoch of dual descent gains less than a step of conjugate gradients
TALL = 4  # samples per feature from which dense data are well conditioned enough for conjugate gradients to gain more
CURVED = {SQUARED: 1.0, LOGISTIC: 0.25, SQUARED_HINGE: 2.0, SQUARED_EPSILON: 2.0}  # the largest second derivative

SOLVERS = ("auto", "cg", "dual", "gram", "newton", "working_set")


@dataclass(frozen=True)
class Shape:
    """What a choice is made from."""

    samples: int
    features: int
    sparse: bool
    loss: int
    l1: bool
    positive: bool
    l2: float
    steepness: float  # mean of c |x|^2 / l2

    @property
    def size(self) -> str:
        return f"{self.samples} samples x {self.features} features, {'sparse' if self.sparse else 'dense'}"

    @property
    def factored(self) -> bool:
        """A d x d matrix a step is cheap."""
        return self.features <= FACTORED or (self.samples + self.features) * self.features**2 <= FLOP


def possible(shape: Shape) -> dict[str, str]:
    """The solvers that fit a penalty and a loss, each with why it cannot be used ("" if it can)."""
    corner, kinked = shape.l1 or shape.positive, shape.loss in KINKED
    no = "there is no L1 penalty and no sign to keep"
    return {
        "newton": "an L1 penalty or a sign has no second derivative" if corner else "",
        "cg": "an L1 penalty or a sign has no second derivative" if corner else "the loss has a kink" if kinked else "",
        "dual": "it wants l2 > 0, no L1 penalty, no sign to keep and not the Poisson loss"
        if corner or not shape.l2 or shape.loss == POISSON
        else "",
        "gram": "" if corner else no,
        "working_set": "" if corner else no,
    }


def choose(shape: Shape) -> tuple[str, str]:
    """The solver's name and the reason."""
    if shape.l1 or shape.positive:
        if shape.features <= FACTORED and shape.samples >= 4 * shape.features:
            return "gram", f"{shape.size}: the d x d matrix is small, and its coordinates read no data"
        return "working_set", f"{shape.size}, L1: only the support and its worst violators are visited"
    if shape.factored:
        return "newton", f"{shape.size}: a d x d matrix a step is cheap, and a few steps reach any accuracy"
    if shape.loss in KINKED:
        return "dual", f"{shape.size}: the loss has a kink, which dual coordinates do not feel"
    if not shape.l2 or shape.loss == POISSON:
        return "cg", f"{shape.size}: without a bound on the dual variables, Newton's direction by conjugate gradients"
    steep = shape.steepness * CURVED[shape.loss]
    if steep > STEEP or (shape.loss != LOGISTIC and not shape.sparse and shape.samples >= TALL * shape.features):
        return (
            "cg",
            f"{shape.size}, c |x|^2 f'' / l2 = {steep:.2g}: a step of conjugate gradients gains more than a dual epoch",
        )
    return (
        "dual",
        f"{shape.size}, c |x|^2 f'' / l2 = {steep:.2g}: an epoch of dual coordinates reads the data once and gains most",
    )
