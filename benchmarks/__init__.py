"""Measurements: scripts, what they measured (results/) and the command that writes the tables
(render.py).
"""
