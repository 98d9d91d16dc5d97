"""Compile the C files of this folder where they run, at first use, into the user's cache folder."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import torch

from mars.default_model import cache_folder

_SHARED_NAMES = ("attention.c", "decoder.c", "decide.c", "sample.c", "pages.c")
_NAMES = {
    torch.bfloat16: (*_SHARED_NAMES, "attention_tiles.c", "linear.c", "lora.c", "pack.c"),
    torch.float32: (*_SHARED_NAMES, "floats.c"),
}
_HEADER_NAMES = (
    "kernels.h",
    "packed.h",
    "tiles.h",
    "sums.h",
    "barrier.h",
    "decoder.h",
    "elementwise.h",
    "sample.h",
)
_HEADERS = tuple(map(Path(__file__).with_name, _HEADER_NAMES))
_COMPILERS = ("gcc", "cc", "clang")
# -ffp-contract=off: which operations are fused is then the same for every number of rows.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-fPIC")
_FLAGS_OF = {torch.bfloat16: (), torch.float32: ("-DFLOAT32",)}
_POINTER, _INTEGER = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "mars_attention": (None, *[_POINTER] * 6),
    "mars_linear": (None, _POINTER, _POINTER, _INTEGER, _POINTER, _INTEGER, _INTEGER),
    "mars_lora": (None, *[_POINTER] * 5, _INTEGER, _INTEGER),  # bf16 only
    "mars_pack": (_INTEGER, _POINTER, _POINTER, *[_INTEGER] * 5),
    "mars_packed_bytes": (_INTEGER, *[_INTEGER] * 3),
    "mars_are_packed": (_INTEGER, *[_POINTER] * 3, _INTEGER),
    "mars_advise": (None, _POINTER, _INTEGER),
    "mars_let_go": (None, _POINTER, _INTEGER),
    "mars_decide": (_INTEGER, _POINTER),
    "mars_decoder": (_INTEGER, _POINTER, _POINTER),
    "mars_linear_path": (_INTEGER, _INTEGER),
}


@lru_cache
def load_kernels(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Return the compiled kernels for models of this dtype.

    None, after one warning, where they do not compile; without one for dtypes other than bfloat16
    and float32.
    """
    if os.environ.get("MARS_KERNELS") == "0" or dtype not in _NAMES:
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(dtype)))
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        warnings.warn(
            f"The kernels in C could not be compiled ({reason[0] if reason else error}); using "
            "torch's own, which are slower and round a little differently from call to call. "
            "MARS_KERNELS=0 turns this message off.",
            stacklevel=2,
        )
        return None
    for name, (result, *arguments) in _SIGNATURES.items():
        if function := getattr(loaded, name, None):
            function.restype, function.argtypes = result, arguments
    return loaded


def _compiled(dtype: torch.dtype) -> Path:
    """Return the shared library, compiling it if no earlier run has."""
    compiler = _find_compiler()
    if compiler is None:
        raise FileNotFoundError(f"no C compiler: none of {', '.join(_COMPILERS)}")
    sources = [Path(__file__).with_name(name) for name in _NAMES[dtype]]
    flags = *_FLAGS, *_FLAGS_OF[dtype]
    texts = [source.read_text() for source in (*_HEADERS, *sources)]
    parts = [*texts, compiler, _run(compiler, "--version"), *flags, _processor()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = cache_folder() / "kernels" / f"mars-{name}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compile-") as scratch:
            made = [f"{scratch}/{source.stem}.o" for source in sources]
            commands = [
                (compiler, *flags, "-c", str(source), "-o", to)
                for source, to in zip(sources, made, strict=True)
            ]
            with ThreadPoolExecutor() as pool:
                list(pool.map(lambda command: _run(*command), commands))
            # Linked without -fopenmp: the OpenMP library is then the one that torch has loaded,
            # whatever its name, and not a second one with a second set of threads.
            shared = f"{scratch}/mars.so"
            _run(compiler, "-shared", *made, "-o", shared)
            os.replace(shared, path)
    return path


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
