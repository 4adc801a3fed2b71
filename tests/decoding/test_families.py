"""Every supported model family: the greedy output is what transformers' plain greedy generation
gives, token for token.
"""

import pytest
import torch
from fakes import needs_compiler
from families import CONFIGS, VOCAB_SIZE, families_compiled, family_pair

from specheads import (
    AcceptanceHead,
    HeadConfig,
    SpeculativeDecoder,
    Warp,
    generate_baseline,
    stopping,
)

NUM_TOKENS = 40  # beyond Gemma 2's sliding window


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    return family_pair(request.param)


@pytest.fixture(scope="module")
def references(pair):
    rows = []
    for seed in range(3):
        prompt = torch.randint(
            VOCAB_SIZE, (1, 3 + 6 * seed), generator=torch.Generator().manual_seed(seed)
        )
        out = pair.target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        rows.append((prompt[0].tolist(), out[0, prompt.shape[1] :].tolist()))
    assert len({token for _, response in rows for token in response}) > 5
    return rows


def head_for(pair, predicts):
    torch.manual_seed(0)
    size = pair.draft.get_input_embeddings().weight.shape[1]
    head = AcceptanceHead(
        HeadConfig(pair.draft_lm.hidden_size, embedding_size=size, depth=1, predicts=predicts)
    )
    torch.nn.init.normal_(head.readout.weight, std=0.3)
    return head.requires_grad_(False)


def num_prepared(decoder):
    return decoder.draft_engine.num_prepared + decoder.target_engine.num_prepared


def test_logits_are_those_of_the_whole_model(pair):
    pair.target_lm.check()


def check_greedy(pair, references, engine, rule):
    stop = (
        stopping.FixedLength(4)
        if rule == "fixed"
        else stopping.HeadThreshold(head_for(pair, rule), 0.7, max_tokens=7)
    )
    decoder = SpeculativeDecoder(pair, stopping=stop, warp=Warp(temperature=0), engine=engine)
    prepared = decoder.warm_up() and num_prepared(decoder)
    accepted = drafted = 0
    for prompt, expected in references:
        out = decoder.generate(prompt, NUM_TOKENS)
        assert out.tokens.tolist() == expected
        accepted = accepted + out.stats.num_accepted
        drafted = drafted + out.stats.num_drafted
    assert 0 < accepted < drafted
    assert num_prepared(decoder) == prepared  # nothing is compiled or captured in mid-generation


@pytest.mark.parametrize(
    ("rule", "engine"),
    [
        ("fixed", "eager"),
        ("next_token", "cuda_graph"),
    ]  # heads in the eager engine: `test_batching.py`
    + [
        pytest.param(rule, "eager", marks=pytest.mark.full)
        for rule in ("input_token", "next_token")
    ]
    + [
        pytest.param(rule, "cuda_graph", marks=pytest.mark.full)
        for rule in ("fixed", "input_token")
    ],
)
def test_greedy_output_is_that_of_plain_generation(pair, references, engine, rule):
    check_greedy(pair, references, engine, rule)


@needs_compiler
@pytest.mark.parametrize("pair", families_compiled(), indirect=True)
def test_compiled_greedy_output_is_that_of_plain_generation(pair, references):
    check_greedy(pair, references, "compiled", "next_token")


@pytest.mark.parametrize("engine", ["eager", "cuda_graph"])
def test_the_target_alone_emits_the_same_tokens(pair, references, engine):
    for prompt, expected in references:
        assert (
            generate_baseline(
                pair, prompt, NUM_TOKENS, warp=Warp(temperature=0), engine=engine
            ).tokens.tolist()
            == expected
        )
