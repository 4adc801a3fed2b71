"""Policies decide by the load how much rows draft; what a row emits stays the target's."""

from dataclasses import replace

import pytest
import torch
from fakes import tiny_pair

from specheads import SpeculativeDecoder, UserError, Warp, stopping
from specheads.decoding.load_aware import LengthPolicy, LoadAware, LoadCosts

GREEDY, SAMPLED = Warp(temperature=0), Warp(top_k=4)
PROMPTS = [[1, 2, 3], [4], [5, 6, 0, 3, 2, 1, 4], [1, 2], [3, 1, 2, 1]]
SEEDS = [3, 1, 4, 1, 5]
# Draft steps cost next to nothing; from eight tokens on every token in flight costs as much as a third of a step.
ROWS = (1, 2, 3, 4, 8, 16, 64)
COSTS = LoadCosts(ROWS, [[0.01 * n + max(1.0, 1 + (rows * (1 + n) - 8) * 19 / 56) for n in range(9)] for rows in ROWS])
SURVIVAL = [0.8, 0.6, 0.5, 0.4, 0.3]


class Always(LengthPolicy):
    """The same length in every round."""

    def length(self, num_requests, positions):
        return self.max_tokens


class Late(LengthPolicy):
    """Drafts nothing in the first rounds, and in some later ones."""

    num_rounds = 0

    def length(self, num_requests, positions):
        self.num_rounds += 1
        return self.max_tokens if self.num_rounds > 10 and self.num_rounds % 12 else 0


def decode(decoder, policy, max_batch=3, prompts=PROMPTS):
    done = dict(decoder.generate_batch(prompts, max_batch, 25, SEEDS[: len(prompts)], policy=policy))
    return [done[number] for number in range(len(prompts))]


# --- the length


def test_the_length_is_that_of_most_tokens_per_second():
    """One row verifies eight tokens for the price of one; eight rows pay for each, and sixty-four more than a token is worth."""
    aware = LoadAware(COSTS, SURVIVAL)
    assert aware.max_tokens == 5
    assert [aware.length(rows, 0) for rows in (1, 2, 8, 64)] == [5, 3, 0, 0]
    speeds = [(1 + sum(SURVIVAL[:length])) / COSTS.round_seconds(2, length) for length in range(6)]
    assert speeds.index(max(speeds)) == 3


def test_positions_in_memory_make_short_drafts_better():
    costs = replace(COSTS, position=0.01)
    assert LoadAware(costs, SURVIVAL).length(1, 0) == 5 > LoadAware(costs, SURVIVAL).length(1, 300) > 0
    assert LoadAware(costs, SURVIVAL).length(1, 40000) == 0


def test_the_seconds_of_a_round_are_those_computed_by_hand():
    costs = LoadCosts((1, 3), ((5.0, 6.0, 10.0), (7.0, 10.0, 20.0)), 0.125)
    assert costs.round_seconds(1, 5) == 10  # longer than any that is known
    assert costs.round_seconds(2, 0) == 6 and costs.round_seconds(2, 0, 8) == 6 + 8 * 0.125
    assert costs.round_seconds(3, 2) == costs.round_seconds(9, 2) == 20
    assert costs.round_seconds(2, 2, 8) == 15 + 8 * 3 * 0.125


# --- in a batch


@pytest.mark.parametrize("warp", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_policy_that_does_as_a_rule_emits_the_same_tokens(warp):
    decoder = SpeculativeDecoder(tiny_pair(7, scale=2.0), stopping=stopping.FixedLength(3), warp=warp, engine="eager")
    expected = [decoder.generate(prompt, 25, seed) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    for one, other in zip(expected, decode(decoder, Always(3)), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert [r.num_drafted for r in one.rounds] == [r.num_drafted for r in other.rounds]


@pytest.mark.parametrize("policy", [LoadAware(COSTS, SURVIVAL), Late(3), Always(0)], ids=["load-aware", "late", "no drafts"])
def test_greedy_rows_are_the_targets_whatever_a_policy_does(policy):
    pair = tiny_pair(vocab_size=7, scale=2.0)
    decoder = SpeculativeDecoder(pair, warp=GREEDY, engine="eager")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = pair.target.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    for max_batch in (1, 5):
        rows = decode(decoder, policy, max_batch)
        assert [row.tokens.tolist() for row in rows] == expected
        assert any(row.stats.num_drafted for row in rows) == bool(policy.max_tokens)


@pytest.mark.parametrize("prompt", [[1, 2, 3], [*range(7)] * 3], ids=["short", "long"])
def test_a_draft_that_begins_late_has_read_everything(prompt):
    # The draft is the target, so that every token is accepted as long as both have read the same.
    decoder = SpeculativeDecoder(tiny_pair(vocab_size=7, scale=2.0, same=True), warp=GREEDY, engine="eager")
    rows = decode(decoder, Late(3), 2, prompts=[prompt, [5, 6]])
    alone = [decoder.generate(each, 25) for each in (prompt, [5, 6])]
    for row, expected in zip(rows, alone, strict=True):
        assert row.tokens.tolist() == expected.tokens.tolist()
        assert row.stats.num_drafted > 6 and row.stats.num_accepted == row.stats.num_drafted
        assert row.rounds[0].num_drafted == row.rounds[9].num_drafted == 0


def test_mistakes_get_one_message():
    for survival in ([], [1.5], [0.5, float("nan")]):
        with pytest.raises(UserError, match="must be probabilities, one for each length"):
            LoadAware(COSTS, survival)
    with pytest.raises(UserError, match="max_tokens=0 must be a positive int"):
        LoadAware(COSTS, SURVIVAL, max_tokens=0)
