"""Speculative decoding: draft -> stop? -> verify -> commit, on three orthogonal axes."""
