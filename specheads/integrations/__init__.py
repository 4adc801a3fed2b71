"""Heads in other decoders."""
