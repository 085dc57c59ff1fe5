"""What a run keeps: checkpoints to go on from, and whole tensors for the caller.

Names are those of one device: ``model/<parameter or buffer>``, ``optimizer/<parameter>/<key>``. Random state is a rank's own.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from partita.runtime.checkpoint import Placement, Saver, load, peek, steps
from partita.runtime.cuts import Cut
from partita.runtime.index import Index
from partita.runtime.net import Net
from partita.runtime.site import Site
from partita.runtime.state import cuts_of, gather, gather_held, optimizer_state
from partita.runtime.weights import fill

OWN = "exchange/"  # beginning of the names of what only one rank of a relaxed axis has
KINDS = ("state", "gradients", "optimizer")


# ---------------------------------------------------------------- checkpoints
def begin(saver: Saver, site: Site, optimizer: torch.optim.Optimizer, root: Path, step: int, *, copy: bool = True) -> None:
    """Start a checkpoint after `step` steps, unless there is one; all ranks call it."""
    if site.net.share(step in steps(root)):
        return
    own = _own(site, optimizer)
    with site.joined():
        tensors, placements, extra = _kept_of(site, optimizer, step)
        saver.begin(root, step, tensors | own, placements, extra, copy=copy or bool(own))


def save(site: Site, optimizer: torch.optim.Optimizer, root: Path, step: int) -> None:
    """A checkpoint after `step` steps, unless there is one, and wait for it; all ranks call it."""
    saver = Saver(site.net)
    begin(saver, site, optimizer, root, step, copy=False)
    saver.wait()


def _kept_of(
    site: Site, optimizer: torch.optim.Optimizer, step: int
) -> tuple[dict[str, Tensor], dict[str, Placement], dict[str, Any]]:
    """What a checkpoint holds: tensors, how they are cut, and the rest as JSON."""
    tensors = {f"model/{name}": t for name, t in _tensors(site).items()}
    placements: dict[str, Placement] = {f"model/{name}": cuts for name, cuts in site.placements.items()}
    plain: dict[str, Any] = {}
    for name, key, value, p in _kept(site, optimizer):
        if isinstance(value, Tensor):
            tensors[f"optimizer/{name}/{key}"] = value
            placements[f"optimizer/{name}/{key}"] = list(cuts_of(site.placements, name, value, p))
        elif isinstance(value, int | float | bool | str) or value is None:
            plain[f"{name}/{key}"] = value
    if site.exchange is not None and site.exchange.alone and site.exchange.rank:
        tensors = {
            name: t for name, t in tensors.items() if not name.startswith("optimizer/")
        }  # of a worker that speaks for all
    tensors |= _random_state(site.net)
    version, numbers, gauss = random.getstate()
    extra = {
        "step": step,
        "optimizer": plain if site.pipe is None else {k: v for some in site.net.gather(plain) for k, v in some.items()},
        "python": [version, list(numbers), gauss],
        "mesh": [list(a) for a in site.mesh.axes],
        "tied": site.tied,
        "transient": site.transient,
        "exchange": site.exchange.mark if site.exchange is not None else "",
    }
    return tensors, placements, extra


def _own(site: Site, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What only this rank of a relaxed axis has."""
    if site.exchange is None:
        return {}
    return {f"{OWN}{site.net.rank}/{name}": t for name, t in site.exchange.kept(optimizer).items()}


def _own_wanted(site: Site, found: Index) -> dict[str, Tensor]:
    """Room for what a checkpoint of the same exchange on the same ranks kept of this rank."""
    if site.exchange is None or found.extra.get("exchange") != site.exchange.mark:
        return {}
    if found.extra.get("mesh") != [list(a) for a in site.mesh.axes]:
        return {}
    names = {n: found.find(n) for n in found.names if n.startswith(f"{OWN}{site.net.rank}/")}
    return {n: torch.zeros(s.shape, dtype=s.dtype, device=site.net.device) for n, s in names.items() if s is not None}


def resume(site: Site, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Fill module, optimizer and random state from the newest checkpoint of a folder; returns the steps it had done."""
    found = peek(folder)
    wanted = {f"model/{name}": pair for name, pair in _model(site).items()}
    state = _optimizer_state(site, optimizer, found)
    wanted |= {f"optimizer/{name}/{key}": (t, cuts) for (name, key), (t, cuts) in state.items()}
    draws = _random_wanted(site.net, found)
    wanted |= {name: (t, ()) for name, t in draws.values()}
    own = _own_wanted(site, found)
    wanted |= {name: (t, ()) for name, t in own.items()}
    extra = load(found.folder, wanted, site.net, spare=("random/", OWN))
    named = site.pieces
    for (name, key), (t, _) in state.items():
        optimizer.state[named[name]][key] = t if site.exchange is None else site.exchange.piece(name, t)
    for full, value in extra["optimizer"].items():
        name, _, key = full.rpartition("/")
        if name in named:  # of this rank's stages
            optimizer.state[named[name]][key] = value
    with site.net.quiet():
        site.refresh()
    if site.exchange is not None:
        head = f"{OWN}{site.net.rank}/"
        site.exchange.fill(optimizer, {n.removeprefix(head): t for n, t in own.items()}, int(extra["step"]))
    _set_random_state(site.net, {kind: t for kind, (_, t) in draws.items()}, extra["python"])
    return int(extra["step"])


def start(site: Site, file: Path) -> None:
    """Fill parameters and buffers from a file of the whole model; all ranks call it."""
    wanted = {name: pair for name, pair in _model(site).items() if name not in site.transient}
    fill(file, wanted, site.shapes, site.tied, site.net)
    with site.net.quiet():
        site.refresh()
    if site.exchange is not None:
        site.exchange.restart(0)


def _model(site: Site) -> dict[str, tuple[Tensor, Placement]]:
    """Parameters and buffers: name -> (this rank's part, how it is cut)."""
    return {name: (t, site.placements.get(name, ())) for name, t in _tensors(site).items()}


def _optimizer_state(
    site: Site, optimizer: torch.optim.Optimizer, found: Index
) -> dict[tuple[str, str], tuple[Tensor, Sequence[Cut]]]:
    """Room for what the checkpoint's optimizer kept of this rank's parameters: (parameter, key) -> (tensor, how it is cut)."""
    named = {n: p for n, p in site.pieces.items() if any(p is q for g in optimizer.param_groups for q in g["params"])}
    room: dict[tuple[str, str], tuple[Tensor, Sequence[Cut]]] = {}
    for full, stored in ((name, found.find(name)) for name in found.names):
        name, _, key = full.removeprefix("optimizer/").rpartition("/")
        if stored is None or not full.startswith("optimizer/") or name not in named:
            continue
        if stored.shape == tuple(site.shapes[name]):
            room[name, key] = (
                torch.zeros_like(site.parts[name], dtype=stored.dtype, requires_grad=False),
                site.placements.get(name, ()),
            )
        else:
            room[name, key] = torch.zeros(stored.shape, dtype=stored.dtype), ()
    return room


def _random_state(net: Net) -> dict[str, Tensor]:
    state = {f"random/{net.rank}/cpu": torch.get_rng_state()}
    if net.device.type == "cuda":
        state[f"random/{net.rank}/cuda"] = torch.cuda.get_rng_state(net.device)
    return state


def _random_wanted(net: Net, found: Index) -> dict[str, tuple[str, Tensor]]:
    """Kind -> (name, room): this rank's own random state, or rank 0's where the ranks are others."""
    wanted = {}
    for kind in ("cpu", "cuda") if net.device.type == "cuda" else ("cpu",):
        for name in (f"random/{net.rank}/{kind}", f"random/0/{kind}"):
            stored = found.find(name)
            if stored is not None and kind not in wanted:
                wanted[kind] = name, torch.zeros(stored.shape, dtype=stored.dtype)
    return wanted


def _set_random_state(net: Net, states: Mapping[str, Tensor], python: Sequence[Any]) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], net.device)
    version, numbers, gauss = python
    random.setstate((version, tuple(numbers), gauss))


def _tensors(site: Site) -> dict[str, Tensor]:
    """This rank's parts of parameters and buffers by name, each once, buffers outside the state dict included."""
    return {name: t.detach() for name, t in (*site.parts.items(), *site.module.named_buffers())}


def _kept(site: Site, optimizer: torch.optim.Optimizer) -> list[tuple[str, str, Any, Tensor]]:
    """(parameter name, key, value, this rank's part of the parameter) of everything an optimizer keeps."""
    parts, kept = site.parts, optimizer_state(site.pieces, optimizer)
    if site.exchange is not None:
        kept = {(n, k): site.exchange.whole(n, v) if isinstance(v, Tensor) else v for (n, k), v in kept.items()}
    return [(name, key, value, parts[name]) for (name, key), value in kept.items()]


# ---------------------------------------------------------------- whole tensors
def collect(site: Site, optimizer: torch.optim.Optimizer, keep: frozenset[str]) -> dict[str, str]:
    """Gather what is asked for and write it to `net.folder`; returns {kind: file name}. All ranks call it."""
    net = site.net
    assert net.folder is not None
    made = {
        "state": lambda: _joined_state(site),
        "gradients": lambda: whole_gradients(site),
        "optimizer": lambda: whole_optimizer(site, optimizer),
    }
    files = {}
    for kind in KINDS:
        if kind in keep:
            whole = made[kind]()
            files[kind] = f"{kind}.safetensors"
            if net.rank == 0 or not net.forked:
                save_file({n: _dense(t).cpu().contiguous().clone() for n, t in whole.items()}, str(net.folder / files[kind]))
    return files


def _joined_state(site: Site) -> dict[str, Tensor]:
    with site.joined():
        return {name: t.clone() for name, t in whole_state(site).items()}


def _dense(t: Tensor) -> Tensor:
    return t.detach().to_dense() if t.is_sparse else t.detach()


def whole_state(site: Site) -> dict[str, Tensor]:
    """The state dict of one device, tied names both, and the buffers outside it."""
    if site.pipe is not None:
        held = _tensors(site)
        found = {name: _held(site, name, held.get(name)) for name in dict.fromkeys(site.keys.values())}
        return {key: found[name] for key, name in site.keys.items()}
    site.rest()
    names = {id(p): n for n, p in site.module.named_parameters()}
    kept = site.module.state_dict(keep_vars=True)
    kept |= {name: b for name, b in site.module.named_buffers() if name not in kept}
    pieces = site.parts
    whole: dict[str, Tensor] = {}
    for key, value in kept.items():
        if isinstance(value, Tensor):
            name = names.get(id(value), key)
            whole[key] = (
                whole[name]
                if name in whole
                else gather(
                    site.net, pieces.get(name, value), site.shapes.get(name, value.shape), site.placements.get(name, ())
                )
            )
    return whole


def whole_gradients(site: Site) -> dict[str, Tensor]:
    """Gradients by parameter name; those without one left out."""
    if site.pipe is not None:
        grads = {name: p.grad for name, p in site.pieces.items() if p.grad is not None}
        listed = {name for told in site.net.gather(list(grads)) for name in told}
        return {name: _held(site, name, grads.get(name)) for name in site.shapes if name in listed}
    found = {name: p.grad for name, p in site.pieces.items() if p.grad is not None}
    if site.exchange is not None:
        found = {name: site.exchange.gradient(name, site.exchange.whole(name, g)) for name, g in found.items()}
    return {name: gather(site.net, g, site.shapes[name], site.placements.get(name, ())) for name, g in found.items()}


def whole_optimizer(site: Site, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Optimizer state as ``<parameter>/<key>``."""
    whole = {}
    if site.pipe is not None:
        return _whole_optimizer_of_stages(site, optimizer)
    for name, key, value, p in _kept(site, optimizer):
        if isinstance(value, Tensor):
            cuts = cuts_of(site.placements, name, value, p)
            whole[f"{name}/{key}"] = gather(site.net, value, site.shapes[name] if cuts else tuple(value.shape), cuts)
    return whole


def _held(site: Site, name: str, block: Tensor | None) -> Tensor:
    """A parameter, its gradient or a buffer, whole, from the rank whose value counts."""
    assert site.pipe is not None, "ranks hold different stages"
    mine = block if site.pipe.owns(name) else None
    return gather_held(site.net, mine, site.shapes[name], site.placements.get(name, ()), site.apart, site.dtypes[name])


def _whole_optimizer_of_stages(site: Site, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`whole_optimizer`, where ranks hold different parameters."""
    assert site.pipe is not None, "ranks hold different stages"
    mine: dict[str, tuple[Tensor, str, bool]] = {}
    for name, key, value, p in _kept(site, optimizer):
        if isinstance(value, Tensor) and site.pipe.owns(name):
            mine[f"{name}/{key}"] = value, name, bool(cuts_of(site.placements, name, value, p)) or value.shape == p.shape
    told = [{k: [name, like, list(t.shape), str(t.dtype)] for k, (t, name, like) in mine.items()}]
    listed = {k: row for some in site.net.gather(told[0]) for k, row in some.items()}
    whole = {}
    for full, (name, like, shape, dtype) in sorted(listed.items()):
        shape, cuts = (site.shapes[name], site.placements.get(name, ())) if like else (shape, ())
        block = mine[full][0] if full in mine else None
        kind = getattr(torch, dtype.removeprefix("torch."))
        whole[full] = gather_held(site.net, block, shape, cuts, site.apart, kind)
    return whole
