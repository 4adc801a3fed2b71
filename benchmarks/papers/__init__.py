"""Reproduced experiments and claims of the papers whose methods `specheads.papers` has."""
