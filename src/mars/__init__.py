"""Multi-token generation with ordinary autoregressive language models.

    from mars import load, generate
    checkpoint = load()
    print(generate(checkpoint, "What is the capital of France?").text)

Names are imported on first use, so that `import mars` (and `mars --help`) does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mars.errors import UserError

if TYPE_CHECKING:
    from mars.checkpoint import Checkpoint, load
    from mars.decoding.custom_generate import custom_generate
    from mars.decoding.generate import generate, stream
    from mars.decoding.options import DecodingOptions
    from mars.decoding.request import Result
    from mars.serving.engine import Engine

    __version__: str

__all__ = [
    "Checkpoint",
    "DecodingOptions",
    "Engine",
    "Result",
    "UserError",
    "__version__",
    "custom_generate",
    "generate",
    "load",
    "stream",
]

_HOMES = {
    "Checkpoint": "mars.checkpoint",
    "DecodingOptions": "mars.decoding.options",
    "Engine": "mars.serving.engine",
    "Result": "mars.decoding.request",
    "custom_generate": "mars.decoding.custom_generate",
    "generate": "mars.decoding.generate",
    "load": "mars.checkpoint",
    "stream": "mars.decoding.generate",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("mars-lm")
    if name not in _HOMES:
        raise AttributeError(f"module 'mars' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return __all__
