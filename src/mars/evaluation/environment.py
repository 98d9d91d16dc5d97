"""What a measurement was made with."""

import os
import platform
from pathlib import Path


def describe_environment() -> dict[str, str | int]:
    """Return versions, processor and number of threads, for the head of every measurement."""
    import torch
    import transformers

    from mars import __version__

    return {
        "mars": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _cpu_model() -> str:
    """Read the processor's name; Python itself only knows it on some systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
