"""Linear layers in bf16: our kernel against `F.linear`, by shape and rows, and for a whole model.

    python benchmarks/linear.py [--rows 1 4 8 ...] [--repeats 15] [--threads 2] [--vectors]

The two take turns; minima of each layer over the repeats, so that it says something on a busy
machine too. By shape: many layers in turn, 200 MB of weights, that small caches do not hold.
--vectors measures the AVX-512 path where there is AMX.
"""

import argparse
import json
import os
import time

import torch
from torch import nn

from mars import load
from mars.engine.kernels.linear import PackedLinears, linear_path
from mars.evaluation.environment import describe_environment

ROWS = (1, 4, 8, 16, 25, 32, 64, 128, 512)
SHAPES = ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576))  # outputs, inputs
WEIGHT_BYTES = 200e6


def time_each(layers: list[nn.Linear], inputs: dict[int, torch.Tensor]) -> torch.Tensor:
    """Run every layer once; return the seconds of each."""
    times = [time.perf_counter()]
    for layer in layers:
        layer(inputs[layer.in_features])
        times.append(time.perf_counter())
    return torch.tensor(times, dtype=torch.float64).diff()


@torch.no_grad()
def compare(packed: PackedLinears, layers: list[nn.Linear], rows: int, repeats: int) -> dict:
    """Measure both ways of running the layers once."""
    widths = {layer.in_features for layer in layers}
    inputs = {width: torch.randn(rows, width).to(torch.bfloat16) for width in widths}
    of_torch, of_kernel = [], []
    for _ in range(repeats):
        of_torch.append(time_each(layers, inputs))
        with packed:
            of_kernel.append(time_each(layers, inputs))
    torch_s, kernel_s = (torch.stack(t).amin(0).sum().item() for t in (of_torch, of_kernel))
    numbers = sum(layer.weight.numel() for layer in layers)
    return {
        "rows": rows,
        "torch_us": round(torch_s / len(layers) * 1e6, 1),
        "kernel_us": round(kernel_s / len(layers) * 1e6, 1),
        "ratio": round(torch_s / kernel_s, 2),
        "gb_per_s": round(2 * numbers / kernel_s / 1e9, 1),
        "gflop_per_s": round(2 * rows * numbers / kernel_s / 1e9),
    }


def layers_of(outputs: int, inputs: int) -> list[nn.Linear]:
    """Make layers of one shape, enough to fill `WEIGHT_BYTES`."""
    count = max(2, round(WEIGHT_BYTES / (2 * outputs * inputs)))
    make = {"bias": False, "dtype": torch.bfloat16}
    return [nn.Linear(inputs, outputs, **make) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--vectors", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.vectors:
        os.environ["MARS_KERNELS"] = "avx512"
    name = ("none", "AVX-512 BF16", "AMX")[linear_path(torch.bfloat16)]
    print(json.dumps({"environment": describe_environment(), "kernel": name}))
    for outputs, inputs in SHAPES:
        layers = layers_of(outputs, inputs)
        packed = PackedLinears(nn.ModuleList(layers))
        for rows in args.rows:
            record = compare(packed, layers, rows, args.repeats)
            print(json.dumps({"shape": f"{outputs}x{inputs}", **record}), flush=True)
    model = load(adapter=None, dtype="bfloat16").model
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    packed = PackedLinears(model)
    for rows in args.rows:
        record = compare(packed, layers, rows, args.repeats)
        for way in ("torch", "kernel"):
            record[f"{way}_ms"] = round(record.pop(f"{way}_us") * len(layers) / 1e3, 2)
        print(json.dumps({"model": "default", **record}), flush=True)


if __name__ == "__main__":
    main()
