"""The decoder emits the tokens of the algorithm as it is written down."""

import pytest
from fakes import tiny_pair

from specheads import SpeculativeDecoder, Warp, generate_baseline, stopping
from specheads.decoding.reference import speculative_decode

NUM_TOKENS = 30


@pytest.mark.parametrize("warp", [Warp(0), Warp(), Warp(0.8, top_k=10)], ids=["greedy", "sampled", "warped"])
@pytest.mark.parametrize("num_drafted", [1, 4])
def test_the_decoder_emits_the_tokens_of_the_reference(num_drafted, warp):
    pair, prompt, num_accepted, num_discarded = tiny_pair(vocab_size=7, scale=1.5), [3, 1, 4], 0, 0
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(num_drafted), warp=warp)
    for seed in range(4):
        out = decoder.generate(prompt, NUM_TOKENS, seed=seed)
        assert out.tokens.tolist() == speculative_decode(pair, prompt, NUM_TOKENS, num_drafted, warp, seed)
        num_accepted, num_discarded = num_accepted + out.stats.num_accepted, num_discarded + out.stats.num_discarded
    assert num_accepted > 10 and num_discarded > 10


def test_the_reference_ends_at_a_stop_token():
    pair, prompt = tiny_pair(vocab_size=7, scale=1.5), [3, 1, 4]
    free = generate_baseline(pair, prompt, NUM_TOKENS, warp=Warp(0)).tokens.tolist()
    pair.target.generation_config.eos_token_id = free[7]
    ended = free[: free.index(free[7]) + 1]
    decoder = SpeculativeDecoder(pair, stopping=stopping.FixedLength(4), warp=Warp(0))
    assert (
        speculative_decode(pair, prompt, NUM_TOKENS, 4, Warp(0)) == decoder.generate(prompt, NUM_TOKENS).tokens.tolist() == ended
    )
