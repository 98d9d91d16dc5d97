"""The demonstration: the exact mode beside ar, with the shipped adapter or a new one."""
