"""Speculative decoding: draft -> stop? -> verify -> commit, with one choice on each of three
axes.
"""
