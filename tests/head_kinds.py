"""Kinds of heads that other decoders have to take: arguments of HeadConfig, by what is said of them."""

LOOK_AHEAD = {"predicts": "next_token", "depth": 2, "width": 24}
ALL_INPUTS = {
    "predicts": "next_token",
    "depth": 1,
    "width": 8,
    "inputs": ("hidden", "embedding", "draft_prob", "max_prob", "entropy", "index", "target_hidden"),
    "target_size": 256,  # of nano's target
}
KINDS = {"look-ahead": LOOK_AHEAD, "all inputs": ALL_INPUTS, "the paper's": {"predicts": "input_token", "depth": 3}}
