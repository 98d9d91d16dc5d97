"""Serve many requests that come at any time with one model."""
