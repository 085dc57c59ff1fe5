"""Peak memory of one step, measured honestly.

On CUDA the allocator knows. On CPU the resident set does, once malloc is made to give memory back: every block above 64 KiB
becomes a mapping of its own that leaves when it is freed. Then

    peak = highest resident memory during the step - resident memory before the model was built

with file-backed pages (code) left out of both. Before either is read, the matrix library gives back its buffers: set-up
multiplies in float64, which takes some that no step needs. The thresholds cost time (each large block is mapped anew), so they
are in force only up to the measured step, and timed steps run with the generous ones malloc arrives at by itself.
"""

import ctypes
import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # mallopt(3), bits/malloc.h
HONEST = 64 << 10  # bytes: blocks of this size on are mappings of their own
GENEROUS = 32 << 20  # bytes: DEFAULT_MMAP_THRESHOLD_MAX on 64 bits, where malloc's own growth ends
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    with STATUS.open() as lines:
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":")), 0)


def _products() -> Callable[[], Any] | None:
    """What gives back the buffers that the matrix library keeps; None where it is another one."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).mkl_serv_free_buffers
    except (OSError, AttributeError):
        return None


class Meter:
    """Measures the peak of one step of this rank. Make it before the model is built.

    After `stop`: `peak` and `plain` are bytes, `note` says what is not as it should be.

    Args:
        device: Where tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.linux = sys.platform == "linux" and not self.cuda
        self.peak: int | None = None  # None where it cannot be known
        self.plain: int | None = None  # of the whole process, whatever malloc keeps
        self.note = "" if self.cuda or self.linux else f"the peak of one step cannot be read on {sys.platform}"
        if self.linux:
            self._libc, self._products = ctypes.CDLL(None), _products()
            self._set(M_MMAP_THRESHOLD, HONEST)
            self._set(M_MMAP_MAX, 1 << 20)
            self._trim()
            self._base = resident("RssAnon")

    def _set(self, parameter: int, value: int) -> None:
        try:
            done = self._libc.mallopt(parameter, value)
        except AttributeError:  # another libc
            done = 0
        if not done:
            self.note = "malloc does not take thresholds here, so memory it keeps counts as used"

    def _trim(self) -> None:
        gc.collect()
        if self._products is not None:
            self._products()
        try:
            self._libc.malloc_trim(0)
        except AttributeError:
            self.note = "malloc cannot be trimmed here, so memory it keeps counts as used"

    def start(self) -> None:
        """Just before the step."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.linux:
            self._trim()
            try:
                CLEAR.write_text("5")  # the kernel starts a new peak
            except OSError as error:
                self.note = f"the peak is of the process so far, not of one step: {CLEAR}: {error.strerror}"

    def stop(self) -> None:
        """Just after the step."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
            self.peak = torch.cuda.max_memory_allocated(self.device)
            self.plain = torch.cuda.max_memory_reserved(self.device)
        elif self.linux:
            code = resident("RssFile") + resident("RssShmem")
            self.plain = resident("VmHWM")
            self.peak = self.plain - code - self._base
        else:
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            self.plain = used if sys.platform == "darwin" else used << 10

    def release(self) -> None:
        """Nothing more is measured: let malloc keep what it has."""
        if self.linux:
            self._set(M_MMAP_THRESHOLD, GENEROUS)
            self._set(M_TRIM_THRESHOLD, 2 * GENEROUS)
