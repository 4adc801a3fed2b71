"""How vLLM is asked for a response with the distribution of our own warps."""

from typing import Any

from specheads.pair import Pair
from specheads.sampling import Warp

SEEDS = 2**53  # as many as there are numbers of which a uniform one is drawn


def sampling_params(pair: Pair, warp: Warp, most: int, uniform: float) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams for a response of the target.

    Args:
        most: tokens of the response at most.
        uniform: in [0, 1), decides the seed.
    """
    chosen: dict[str, Any] = {"temperature": float(warp.temperature), "stop_token_ids": sorted(pair.stop_tokens)}
    if not warp.greedy:
        chosen |= {"top_k": warp.top_k, "top_p": float(warp.top_p)}
    if padded := range(pair.vocab_size, pair.target.config.get_text_config().vocab_size):
        chosen["logit_bias"] = dict.fromkeys(map(str, padded), -100.0)  # tokens that the tokenizer does not know
    return chosen | {"max_tokens": most, "seed": int(uniform * SEEDS)}
