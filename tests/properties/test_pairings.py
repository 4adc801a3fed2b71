"""Every allowed pairing of drafting, stopping and verification, on random pairs with random warps,
lengths, end tokens and windows; every other pairing is refused.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from draftings import RULES
from hypothesis import given
from hypothesis import strategies as st
from properties.strategies import PAIRINGS, cases, tries

from specheads import Warp

greedy = st.just(Warp(temperature=0))
LOSSLESS = [(way, rule) for way, rule in PAIRINGS if RULES[rule]().lossless]


def plain_greedy(case):
    """Return the response that the target's most likely tokens make, without any engine."""
    text = list(case.prompt)
    limit = min(len(case.prompt) + case.max_new_tokens, case.window)
    while len(text) < limit and (len(text) == len(case.prompt) or text[-1] not in case.stop_tokens):
        text.append(int(case.pair.target(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(case.prompt) :]


@pytest.mark.parametrize("pairing", LOSSLESS)
@tries(0.3)
@given(st.data())
def test_greedy_output_of_lossless_rules_is_the_targets(pairing, data):
    case = data.draw(cases([pairing], greedy).filter(lambda case: case.verification.lossless))
    assert case.decoder().generate(*case.request).tokens.tolist() == plain_greedy(case)


@pytest.mark.parametrize("pairing", PAIRINGS)
@tries(0.3)
@given(st.data())
def test_every_token_is_accounted_for(pairing, data):
    """Drafted tokens were accepted or discarded.

    Emitted ones were accepted or the target's, but for those cut after an end.
    """
    case = data.draw(cases([pairing]))
    out = case.decoder().generate(*case.request)
    tokens = out.tokens.tolist()
    limit = min(case.max_new_tokens, case.window - len(case.prompt))
    assert list(itertools.chain.from_iterable(record.tokens for record in out.rounds)) == tokens
    assert 1 <= len(tokens) <= limit and all(0 <= token < case.vocab_size for token in tokens)
    assert not set(tokens[:-1]) & set(case.stop_tokens)
    ended = tokens[-1] in case.stop_tokens
    assert out.finish_reason == (
        "stop" if ended else "length" if len(tokens) == case.max_new_tokens else "context"
    )
    assert ended or len(tokens) == limit
    for number, record in enumerate(out.rounds):
        num_cut = record.num_accepted + 1 - len(record.tokens)
        assert num_cut == 0 or (ended and number == len(out.rounds) - 1 and num_cut > 0)
        num_copied = record.num_discarded + record.num_accepted - record.num_drafted
        assert 0 <= num_copied <= record.num_accepted
        assert record.num_discarded >= 0 and record.num_target_calls == 1
        most = case.stopping.max_tokens
        assert record.num_drafted <= (case.drafting.most_verified(most) or most)
    stats = out.stats
    assert (stats.num_tokens, stats.num_target_calls) == (len(tokens), len(out.rounds))
    for name in ("num_drafted", "num_accepted", "num_discarded", "num_draft_calls"):
        assert getattr(stats, name) == sum(getattr(record, name) for record in out.rounds)


@tries(2)
@given(cases())
def test_the_same_seed_gives_the_same_output_and_a_stream_adds_up_to_it(case):
    decoder = case.decoder()
    first = decoder.generate(*case.request)
    again = decoder.generate(*case.request)
    other = case.decoder().generate(*case.request)
    assert "".join(decoder.stream(*case.request)) == first.text
    for out in (again, other):
        assert out.tokens.tolist() == first.tokens.tolist()
        assert [record.num_drafted for record in out.rounds] == [
            record.num_drafted for record in first.rounds
        ]


@given(cases(), cases())
def test_a_decoder_remembers_nothing_of_other_prompts_and_rules(case, other):
    """Rules of one decoder share its memory."""
    other = replace(other, prompt=[token % case.vocab_size for token in other.prompt])
    expected = case.decoder().generate(*case.request)
    decoder = case.decoder()
    if len(other.prompt) < case.window:
        decoder.generate(other.prompt, other.max_new_tokens, other.seed, ())
        if other.stopping.max_tokens <= decoder._longest and (
            case.drafting.reads_draft or not other.stopping.needs
        ):
            decoder.with_stopping(other.stopping).generate(
                other.prompt, other.max_new_tokens, other.seed, ()
            )
    assert decoder.generate(*case.request).tokens.tolist() == expected.tokens.tolist()
