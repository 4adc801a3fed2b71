"""Acceptance heads: the network, its inputs, its training and its files."""
