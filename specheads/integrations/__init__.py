"""Heads in other decoders and formats."""
