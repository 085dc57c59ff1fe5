"""What a rank sends for, and holds of, one block of a transformer in each tensor layout: sums over what the kernels move.

Sizes are counted in elements with hidden = 1: a ratio rho = tokens / hidden says everything. Linear layers of a block, inputs x
outputs in hiddens: qkv 1 x 3, projection 1 x 1, up 1 x 4, down 4 x 1. Norms and biases, and attention between its layers, move
nothing that counts.
"""

from math import isqrt, prod

from partita.program import panels

LAYOUTS = ("1D", "2D", "2.5D", "3D")
LINEARS = ((1, 3), (1, 1), (1, 4), (4, 1))
SCALE = 1 << 40  # panels counts whole bytes; so large a hidden that rounding is nothing
WHOLE, CUT = (
    5,
    12,
)  # values of the hidden's width that a block keeps: norms, their inputs and the output; qkv 3, attention 1, MLP 4 + 4


def shapes(name: str, ranks: int) -> list[tuple[int, ...]]:
    """The meshes of a layout on so many ranks: 2D q x q, 2.5D d x q x q with 1 < d <= q, 3D q x q x q."""
    q, cube = isqrt(ranks), round(ranks ** (1 / 3))
    if name == "1D":
        return [(ranks,)]
    if name == "2D":
        return [(q, q)] if q * q == ranks and q > 1 else []
    if name == "3D":
        return [(cube,) * 3] if cube**3 == ranks and cube > 1 else []
    found = ((d, isqrt(ranks // d), isqrt(ranks // d)) for d in range(2, q + 1) if ranks % d == 0)
    return [s for s in found if prod(s) == ranks and s[1] >= s[0]]


def best(name: str, ranks: int, rho: float) -> tuple[int, ...]:
    """The mesh on which a rank sends least."""
    return min(shapes(name, ranks), key=lambda mesh: sent_on(name, mesh, rho))


def sent(name: str, ranks: int, rho: float) -> float:
    """Elements a rank sends on the best mesh for forward and backward of a block's linear layers, over hidden squared."""
    return sent_on(name, best(name, ranks, rho), rho)


def sent_on(name: str, mesh: tuple[int, ...], rho: float) -> float:
    """The same on this mesh."""
    if name == "1D":
        return 4 * 2 * (mesh[0] - 1) / mesh[0] * rho  # two all-reduces of tokens x hidden forward, two backward
    return sum(_linear(name, mesh, rho, k, n) for k, n in LINEARS)


def _linear(name: str, mesh: tuple[int, ...], rho: float, k: int, n: int) -> float:
    ranks = prod(mesh)
    x, w, y = (round(SCALE * size / ranks) for size in (rho * k, k * n, rho * n))  # a rank's blocks
    if name == "3D":
        sizes = dict(zip(("inputs", "weights", "outputs"), mesh, strict=True))
        moved = [*panels.cube(*mesh, x, w, y), *panels.cube_backward(*mesh, x, w, y)]
        return sum(_sent(m, sizes.get(m.over, 1)) for m in moved) / SCALE
    depth, (r, c) = (mesh[0], mesh[1:]) if len(mesh) == 3 else (1, mesh)
    moved = [*panels.ab(r, c, x, w * depth), *panels.abt(r, c, w * depth, x), *panels.atb(r, c, x, w * depth)]
    return (sum(_sent(m, 1) for m in moved) + 2 * (depth - 1) / depth * w * depth) / SCALE


def _sent(moved: panels.Moved, size: int) -> float:
    return {"send": 1.0, "receive": 0.0, "all_gather": (size - 1) / size}[moved.op] * moved.nbytes


def held(name: str, ranks: int, rho: float) -> float:
    """Parameters and kept activations of a block that a rank holds, as a share of one device's."""
    weights, values = 12, rho * (WHOLE + CUT)
    if name == "1D":
        return (weights / ranks + rho * (WHOLE + CUT / ranks)) / (weights + values)
    planes = best(name, ranks, rho)[0] if name == "2.5D" else 1
    return (weights * planes + values) / ranks / (weights + values)
