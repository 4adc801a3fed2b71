"""Distilling a better draft for the same target."""
