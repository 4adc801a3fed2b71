"""Kinds of heads that other decoders must support: arguments of HeadConfig by a name of the
kind.
"""

LOOK_AHEAD = {"predicts": "next_token", "depth": 2, "width": 24}
ALL_INPUTS = {
    "predicts": "next_token",
    "depth": 1,
    "width": 8,
    "inputs": ("hidden", "embedding", "draft_prob", "max_prob", "entropy", "second_prob"),
}
KINDS = {
    "look-ahead": LOOK_AHEAD,
    "all inputs": ALL_INPUTS,
    "SpecDec++": {"predicts": "input_token", "depth": 3},
}
