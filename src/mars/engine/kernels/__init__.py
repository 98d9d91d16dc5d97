"""Kernels in C, compiled where they run, at first use, and kept in the user's cache folder.

`attention.c` gives every query the same bits whatever stands beside it, which the kernels of torch
do not, and is faster for few queries. Without a C compiler everything works without it. The
environment variable MARS_KERNELS=0 switches it off.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import lru_cache
from pathlib import Path

import torch

from mars.default_model import cache_folder

_SOURCE = Path(__file__).with_name("attention.c")
_COMPILERS = ("gcc", "cc", "clang")
# -ffp-contract=off: which operations are fused is then the same for every number of rows.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
_DTYPES = (torch.bfloat16, torch.float32)


class _Call(ctypes.Structure):
    """`struct call` of attention.c."""

    _fields_ = (
        ("sizes", ctypes.c_int64 * 7),
        ("strides", ctypes.c_int64 * 11),
        ("is_bf16", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor | None:
    """Attend on the CPU, without gradient; a query's result depends on nothing but what it sees.

    It is the same, bit by bit, for any number of columns, rows, invisible slots and threads.

    Args:
        query: (B, H, T, D), bf16 or fp32.
        key: (B, H / G, K, D), any strides.
        value: (B, H / G, K, W).
        mask: bool (B, 1, T, K), True is visible. A query that sees nothing gets zeros.
        scale: factor of the scores; None is 1 / sqrt(D).

    Returns:
        (B, T, H, W), or None where the kernel cannot be used.
    """
    if query.device.type != "cpu" or query.dtype not in _DTYPES or mask.dtype != torch.bool:
        return None
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad):
        return None
    function = _attention_function()
    if function is None:
        return None
    rows, heads, columns, width = query.shape
    kv_heads, slots, value_width = value.shape[1:]
    query, key, value, mask = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value, mask)
    )
    call = _Call(
        (rows, heads, kv_heads, columns, slots, width, value_width),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *mask.stride()[::2]),
        query.dtype == torch.bfloat16,
        torch.get_num_threads(),
        width**-0.5 if scale is None else scale,
    )
    output = query.new_empty(rows, columns, heads, value_width)
    pointers = [x.data_ptr() for x in (output, query, key, value, mask)]
    function(ctypes.byref(call), *pointers)
    return output


@lru_cache(maxsize=1)
def _attention_function() -> "ctypes._NamedFuncPointer | None":
    """Return the compiled function; None, after one warning, where there is none."""
    if os.environ.get("MARS_KERNELS") == "0":
        return None
    try:
        function = ctypes.CDLL(str(_compiled())).mars_attention
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        warnings.warn(
            f"The attention kernel could not be compiled ({reason[0] if reason else error}); using "
            "torch's own, which is slower and rounds a little differently from call to call. "
            "MARS_KERNELS=0 turns this message off.",
            stacklevel=2,
        )
        return None
    function.argtypes = [ctypes.POINTER(_Call)] + [ctypes.c_void_p] * 5
    function.restype = None
    return function


def _compiled() -> Path:
    """Return the shared library, compiling it if no earlier run has."""
    compiler = _find_compiler()
    if compiler is None:
        raise FileNotFoundError(f"no C compiler: none of {', '.join(_COMPILERS)}")
    parts = [_SOURCE.read_text(), compiler, _run(compiler, "--version"), *_FLAGS, _processor()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"attention-{name}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".compile-") as scratch:
            made, shared = f"{scratch}/attention.o", f"{scratch}/attention.so"
            _run(compiler, *_FLAGS, "-c", str(_SOURCE), "-o", made)
            # Linked without -fopenmp: the OpenMP library is then the one that torch has loaded,
            # whatever its name, and not a second one with a second set of threads.
            _run(compiler, "-shared", made, "-o", shared)
            os.replace(shared, library)
    return library


def _find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _processor() -> str:
    """Describe the processor: -march=native means it, and cache folders travel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features")))
