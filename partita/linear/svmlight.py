"""svmlight files of any size: read in pieces into a folder of binary arrays, and opened from there as a memory-mapped CSR
matrix.
"""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.datasets import load_svmlight_file

PIECE = 1 << 24  # bytes of text that are parsed at once
ENTRY = 4  # bytes the shortest entry takes in a file, " 1:2"


def read_svmlight(
    path: str | Path, folder: str | Path, *, features: int | None = None, zero_based: bool = False
) -> tuple[Any, Any]:
    """Read a svmlight file of any size.

    Args:
        path: The file.
        folder: Where the binary arrays go; they are used again if they are there already.
        features: How many there are; by default as many as occur.
        zero_based: Columns count from 0; svmlight's own count from 1.

    Returns:
        The samples, a CSR array mapped from the folder, and their labels.
    """
    folder = Path(folder)
    if not (folder / "shape.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(Path(path), folder, features, zero_based=zero_based)
    shape = json.loads((folder / "shape.json").read_text())
    index = np.dtype(shape["index"])
    starts, labels = (np.fromfile(folder / name, kind) for name, kind in (("starts", index), ("labels", np.float64)))
    entries = {name: _mapped(folder / name, kind) for name, kind in (("columns", index), ("values", np.dtype(np.float32)))}
    X = sparse.csr_array((shape["samples"], shape["features"]), dtype=np.float32)
    X.indptr, X.indices, X.data = starts, entries["columns"], entries["values"]
    return X, labels


def _mapped(path: Path, kind: np.dtype[Any]) -> Any:
    """Copy on write, so that compiled code sees an array like any other; nothing is ever written."""
    return np.memmap(path, kind, mode="c") if path.stat().st_size else np.empty(0, kind)


def _write(path: Path, folder: Path, features: int | None, *, zero_based: bool) -> None:
    index = np.dtype(np.int32 if path.stat().st_size // ENTRY < 2**31 else np.int64)
    samples, seen, stored = 0, 0, 0
    load: Any = load_svmlight_file  # its stub knows float64 alone
    names = ("columns", "values", "starts", "labels")
    files = {name: (folder / name).open("wb") for name in names}
    try:
        files["starts"].write(np.zeros(1, index).tobytes())
        for piece in _pieces(path):
            X, y = load(io.BytesIO(piece), dtype=np.float32, zero_based=zero_based, n_features=features)
            X.sum_duplicates()
            seen = max(seen, X.shape[1])
            for name, values in (
                ("columns", X.indices.astype(index)),
                ("values", X.data),
                ("starts", (X.indptr[1:].astype(np.int64) + stored).astype(index)),
                ("labels", y.astype(np.float64)),
            ):
                files[name].write(values.tobytes())
            samples, stored = samples + X.shape[0], stored + X.nnz
    finally:
        for file in files.values():
            file.close()
    said = {"samples": samples, "features": features or seen, "index": index.name}
    (folder / "shape.json").write_text(json.dumps(said))


def _pieces(path: Path) -> Iterator[bytes]:
    """Whole lines, PIECE bytes or a little more at a time."""
    with path.open("rb") as file:
        while lines := file.readlines(PIECE):
            yield b"".join(lines)
