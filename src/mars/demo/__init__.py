"""The demonstration: train for a few minutes, then watch AR and multi-token decoding."""
