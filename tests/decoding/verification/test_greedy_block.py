"""Greedy block verification in the decoder: modifications go from round to round, with the distributions they need."""

import copy

import pytest
import torch
from fakes import constant_head, tiny_pair

from specheads import SpeculativeDecoder, UserError, Warp, stopping
from specheads.decoding.verification import GreedyBlockVerification


class Spy(GreedyBlockVerification):
    """Keeps what every round was given and what it gave."""

    def __init__(self, num_levels=4):
        super().__init__(num_levels)
        self.rounds = []

    def __call__(self, state, block, uniform, next_uniform):
        verdict, after = super().__call__(state, block, uniform, next_uniform)
        self.rounds.append(copy.deepcopy((state, block, verdict, after)))  # the decoder writes over them
        return verdict, after


class Alternating(stopping.FixedLength):
    """Lengths that are known beforehand and change from round to round, so that modifications reach beyond the next draft."""

    compile_key = "alternating"

    def __init__(self):
        super().__init__(5)

    def end_round(self, state, num_drafted, num_accepted):
        return super().end_round(state, num_drafted, num_accepted)._replace(num_tokens=6 - state.num_tokens)


@pytest.mark.parametrize("num_levels", [1, 4])
def test_levels_are_carried_from_round_to_round_with_the_distributions_they_need(num_levels):
    pair, prompt = tiny_pair(vocab_size=4, scale=1.5), [0, 1]
    rule = Spy(num_levels)
    decoder = SpeculativeDecoder(pair, stopping=Alternating(), verification=rule, warp=Warp(), engine="eager")
    short = 0
    for seed in range(20):
        rule.rounds.clear()
        out = decoder.generate(prompt, 25, seed=seed)
        before, text = rule.start_prompt(1, torch.device("cpu")), list(prompt)
        for number, ((state, block, verdict, after), made) in enumerate(zip(rule.rounds, out.rounds, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
            length, accepted = block.lengths.item(), verdict.num_accepted.item()
            assert block.planned.item() == min((5, 1)[number % 2], 25 - (len(text) - len(prompt)) - 1)
            if before.num_probs_needed > length:  # the distribution after the draft is there, at the price of a forward pass
                short += 1
                full = torch.tensor([[*text, *block.tokens[0, :length].tolist()]])
                distribution = pair.draft(full).logits[0, -1].softmax(dim=-1)
                torch.testing.assert_close(block.draft_probs[0, length], distribution, atol=1e-10, rtol=0)
                assert made.num_draft_calls == length + 1
            else:
                assert made.num_draft_calls == length
            # What a rejection modifies reaches as far as the block would have, unless it changes nothing or finds no room.
            assert (
                after.num_probs_needed.item() <= max(before.num_probs_needed.item(), length) - accepted - 1
                or after.num_probs_needed.item() == 0
            )
            before, text = after, text + list(made.tokens)
    assert short > 0


def test_drafts_of_unknown_length_modify_nothing():
    rule = Spy()
    head = stopping.HeadThreshold(constant_head(0.7), 0.5)
    SpeculativeDecoder(tiny_pair(), stopping=head, verification=rule, engine="eager").generate([0, 1], 30)
    assert all(block.planned.item() == 0 and after.num_probs_needed.item() == 0 for _, block, _, after in rule.rounds)


@pytest.mark.parametrize("levels", [0, 1.5, True])
def test_an_impossible_number_of_levels_is_refused(levels):
    with pytest.raises(UserError, match="verification.num_levels"):
        GreedyBlockVerification(levels)
