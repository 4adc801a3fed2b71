"""Joules per token: counters of the hardware, the power of an idle machine, and what responses took."""
