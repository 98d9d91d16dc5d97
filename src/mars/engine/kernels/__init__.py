"""Kernels in C for the CPU, compiled where they run, at first use.

They give a row the same bits whatever stands beside it, which the kernels of torch do not, and are
faster for few rows: `attention`, and `linear` in bf16. Without a C compiler everything works
without them. The environment variable MARS_KERNELS=0 switches them off.
"""
