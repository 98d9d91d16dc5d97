"""What depends on the device, and all of it: waiting, memory, precision, description."""

import subprocess
from pathlib import Path
from typing import Any

import torch

from mars.evaluation.environment import describe_environment


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told; a clock means nothing before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak(device: torch.device) -> None:
    """Forget how much memory was in use."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory that tensors took since `reset_peak`; None where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def release(device: torch.device) -> None:
    """Give memory back that no tensor uses."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def use_full_float32() -> None:
    """Let products in float32 be products in float32, not in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def describe(device: torch.device) -> dict[str, Any]:
    """Say what was measured with."""
    described: dict[str, Any] = {**describe_environment(), "commit": _commit()}
    if device.type != "cuda":
        return described | {"device": str(device)}
    properties = torch.cuda.get_device_properties(device)
    return described | {
        "device": properties.name,
        "device_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _commit() -> str | None:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        folder = Path(__file__).parent
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
