"""What every benchmark prints and stores: the machine, the versions, medians of paired runs."""

import platform
import statistics
from pathlib import Path

import torch
import transformers

import mars


def cpu_model() -> str:
    """Name the processor as the operating system does."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def environment() -> dict[str, object]:
    """Describe the machine and the versions a figure was measured with."""
    return {
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "mars": mars.__version__,
    }


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the runs of the ratio within a run."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
