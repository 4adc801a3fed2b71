"""Acceptance heads: their network, batches of inputs, calibration, metrics and files."""
