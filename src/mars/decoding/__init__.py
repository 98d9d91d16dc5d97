"""Decode one or several tokens per forward."""
