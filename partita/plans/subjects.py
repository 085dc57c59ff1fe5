"""Reads a [workload] table: the model it names, the sizes it gives, the data it points at."""

import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from partita.errors import Fault
from partita.plans.catalogue import named
from partita.plans.fields import HALF, LAWS, SIZE, Law, kind_of, nearest, read, unknown_keys
from partita.plans.hf import spec_of_hf_config
from partita.plans.within import workload_faults
from partita.workload import MODELS, Model, Workload

OWN = {name: hint for name, hint in typing.get_type_hints(Workload).items() if name not in ("model", "spec", "extra")}
_TARGET = re.compile(r"python:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True)
class Read:
    """A workload as far as it could be read.

    Args:
        workload: What was wrong stands at its default.
        faults: Everything wrong with the table.
        bad: The keys that were wrong: laws about them say nothing.
    """

    workload: Workload
    faults: tuple[Fault, ...] = ()
    bad: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Found:
    """What a model's name stands for."""

    name: str
    spec: Model | None = None
    config: dict[str, Any] | None = None
    fault: Fault | None = None


def read_table(table: Mapping[str, Any], folder: Path, at: str = "workload") -> Read:
    """The workload of a parsed [workload] table whose relative paths start at `folder`."""
    found = _model(table.get("model"), folder, f"{at}.model")
    rest = {k: v for k, v in table.items() if k != "model"}
    base, hints = found.spec, OWN | _hints(found.spec)
    values, faults = read(rest, hints, at, _law)
    bad = {f.at.rsplit(".", 1)[-1] for f in faults}
    spare = {k: v for k, v in rest.items() if k not in hints}
    if base:
        faults += unknown_keys(spare, [*hints, "model"], at)
    elif found.config:
        faults += unknown_keys(spare, [*OWN, *found.config, "sequence", "model"], at)
    if found.fault:
        faults, bad = [found.fault, *faults], {*bad, "model"}
    good = {k: v for k, v in values.items() if k not in bad}
    spec = replace(base, **{k: v for k, v in good.items() if k not in OWN}) if base else None
    own = {k: v for k, v in good.items() if k in OWN}
    workload = _mastered(absolute(Workload(model=found.name, spec=spec, extra={} if base else spare, **own), folder))
    faults += workload_faults(workload, at, config=found.config, bad=frozenset(bad))
    return Read(workload, tuple(faults), frozenset(bad))


def given_faults(workload: Workload, at: str = "workload") -> list[Fault]:
    """What is wrong with a workload that Python made, its data apart: a proof brings its own batches."""
    known = workload.spec is not None or ":" in workload.model
    found = _Found(workload.model) if known else _model(workload.model, Path(), f"{at}.model")
    values = {k: v for k, v in workload.table().items() if k not in ("model", *workload.extra)}
    _, faults = read(values, OWN | _hints(workload.spec), at, _law)
    if found.fault or faults:
        return [*([found.fault] if found.fault else []), *faults]
    return workload_faults(workload, at, data=False)


def complete(workload: Workload) -> Workload:
    """A workload built in Python by a model's name alone gets the sizes of that name."""
    if workload.spec is not None or ":" in workload.model:
        return workload
    found = _model(workload.model, Path(), "workload.model")
    return replace(workload, spec=found.spec)


def absolute(workload: Workload, folder: Path) -> Workload:
    """The same workload with the path of its data made absolute."""
    if workload.data is None:
        return workload
    return replace(workload, data=str((folder / Path(workload.data).expanduser()).resolve()))


def _mastered(workload: Workload) -> Workload:
    """In a file half types have a float32 master unless another is named; their own type means none."""
    if workload.dtype in HALF and workload.master is None:
        return replace(workload, master="float32")
    return replace(workload, master=None) if workload.master == workload.dtype else workload


def model_names() -> str:
    """What a model may be called."""
    return f'{", ".join([*MODELS, *named()])}, "hf:PATH/config.json" or "python:package.module:factory"'


def _hints(spec: Model | None) -> dict[str, Any]:
    """Field -> type of a model's dataclass."""
    hints = typing.get_type_hints(type(spec)) if spec else {}
    return {f.name: hints[f.name] for f in fields(spec)} if spec else {}


def _law(key: str) -> Law | None:
    """A field's own law; the sizes of models and the batch have that of a size."""
    return LAWS.get(key, SIZE if key not in OWN or key in ("batch", "accumulate") else None)


def _model(text: Any, folder: Path, at: str) -> _Found:
    """What a model's name stands for; a path in it is made absolute."""
    if text is None:
        law = "a workload is a model and how it is trained"
        return _Found("", fault=Fault("P119", "no model is named", law=law, cure=f"model = {model_names()}", at=at))
    if not isinstance(text, str):
        what, law = f"model = {text!r} is not a string", "a model is named by a string"
        return _Found("", fault=Fault("P102", what, kind_of(text), law, f"model = {model_names()}", at))
    if text in MODELS:
        return _Found(text, MODELS[text]())
    if text in named():
        return _Found(text, named()[text].spec())
    if text.startswith("hf:"):
        return _hf(text, folder, at)
    if text.startswith("python:"):
        law = "the factory is an importable callable that returns the module"
        bad = Fault("P112", f"malformed target {text!r}", law=law, cure='"python:package.module:factory"', at=at)
        return _Found(text, fault=None if _TARGET.fullmatch(text) else bad)
    close = nearest(text, [*MODELS, *named()])
    cure = close if close.endswith("?") else model_names()
    law = "a model is in the catalogue, a Hugging Face config or a Python factory"
    return _Found(text, fault=Fault("P107", f"unknown model {text!r}", law=law, cure=cure, at=at))


def _hf(text: str, folder: Path, at: str) -> _Found:
    path = (folder / Path(text.removeprefix("hf:")).expanduser()).resolve()
    path = path / "config.json" if path.is_dir() else path
    name = f"hf:{path}"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        law, cure = "an hf: model is described by its config.json", 'model = "hf:PATH/config.json"'
        return _Found(name, fault=Fault("P108", f"config {str(path)!r} does not exist", law=law, cure=cure, at=at))
    except (OSError, ValueError) as error:
        cure = "a config.json as transformers writes it"
        return _Found(name, fault=Fault("P109", f"config {str(path)!r} is not a JSON file", have=str(error), cure=cure, at=at))
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        law, cure = "model_type says which model it is", '"model_type": "llama"'
        return _Found(name, fault=Fault("P112", f"config {str(path)!r} names no model_type", law=law, cure=cure, at=at))
    fault = _bad_size(config, path, at)
    return _Found(name, None if fault else spec_of_hf_config(config), config, fault)


def _bad_size(config: Mapping[str, Any], path: Path, at: str) -> Fault | None:
    """The first size of a config that is no count."""
    for key, value in config.items():
        size = key.startswith(("n_", "num_")) or key.endswith("_size") or key == "max_position_embeddings"
        if size and value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            law, cure = "a size is an integer of at least 1", f'"{key}": 1 or more'
            return Fault("P112", f"{key} = {value!r} in {str(path)!r} is no size", f"{key} = {value!r}", law, cure, at)
    return None
