"""Lengths of drafts that know the load: how deep the requests of a batch draft, and how much of their drafts is submitted.

All is numpy in float64 on the host; nothing here reads a model.
"""
