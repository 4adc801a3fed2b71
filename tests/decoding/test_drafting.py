"""Chains: one row in steps of its own, and several in lockstep."""

from typing import NamedTuple

import pytest
import torch
from fakes import constant_head, tiny_pair
from torch import Tensor

from specheads import SpeculativeDecoder, Warp, stopping
from specheads.decoding.drafting import Autoregressive


class Count(NamedTuple):
    steps: Tensor  # (B,) long, in all rounds
    distribution: Tensor  # (B, 2), a state with a dimension more


class EveryThird(stopping.StoppingRule):
    """Stop after every third step since the prompt: a rule whose state would show a step that
    should not have been.
    """

    needs = frozenset({"max_prob"})
    max_tokens = 5
    compile_key = "every third"

    def start_prompt(self, batch, device):
        return Count(
            torch.zeros(batch, dtype=torch.long, device=device),
            torch.zeros(batch, 2, device=device),
        )

    def start_round(self, state):
        return state

    def step(self, state, features):
        steps = state.steps + 1
        return (
            Count(steps, state.distribution + features["max_prob"][:, None].float()),
            steps % 3 == 0,
        )


RULES = {
    "fixed": stopping.FixedLength(3),
    "head": stopping.HeadThreshold(constant_head(0.8), 0.5),
    "across rounds": EveryThird(),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("warp", [Warp(temperature=0), Warp()], ids=["greedy", "sampled"])
def test_rows_draft_what_a_single_row_drafts(warp, rule):
    """Rows whose drafts have ended do not step the rule while others draft on."""
    decoder = SpeculativeDecoder(tiny_pair(5), Autoregressive(), rule, warp=warp, engine="eager")
    prompts = [[0, 1, 2], [3], [2, 2, 1, 0]]
    seeds = [5, 6, 7]
    alone = [
        decoder.generate(prompt, 40, seed, stop_tokens=[4])
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    rows = decoder.generate_batch(
        prompts, max_batch=3, max_new_tokens=40, seeds=seeds, stop_tokens=[4]
    )
    for number, one in enumerate(alone):
        assert rows[number].tokens.tolist() == one.tokens.tolist()
        for a, b in zip(one.rounds, rows[number].rounds, strict=True):
            assert (b.num_drafted, b.num_accepted, b.num_draft_calls) == (
                a.num_drafted,
                a.num_accepted,
                a.num_draft_calls,
            )
            assert a.num_draft_calls == a.num_drafted
