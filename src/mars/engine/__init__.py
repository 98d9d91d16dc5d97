"""Run stock models on many rows of different lengths, with one KV cache."""
