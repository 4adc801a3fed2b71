"""Sampled rows of a live batch follow the target whatever their neighbours draft; a policy that peeks at a token is seen."""

import itertools

import numpy as np
import torch
from fakes import tiny_pair
from statistics_helper import chi_square_p_value

from specheads import SpeculativeDecoder
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.load_aware import LoadAware
from specheads.decoding.load.plan import SurvivalSample
from specheads.decoding.load.readout import LogisticAcceptance, ReadOut

PROMPTS = [[1, 2, 0], [2], [0, 1]]  # in three rows, from which requests leave and which others take
NUM_REQUESTS, NUM_TOKENS = 250, 3  # of each prompt; emitted tokens
PAIR = tiny_pair(vocab_size=3, scale=1.0)
# Draft steps are cheap; beyond three rows every token in flight costs nearly as much as a token is worth.
COSTS = LoadCosts(SecondsTable((1, 8), (0.01, 0.01)), SecondsTable((1, 3, 12), (1.0, 1.0, 2.1)))
READ_OUT = ReadOut(LogisticAcceptance({"max_prob": 6.0, "bias": -3.0}), LogisticAcceptance({"log_draft_prob": 3.0, "bias": 3.5}))
SAMPLE = SurvivalSample(np.linspace(0.3, 0.95, 12)[:, None] ** np.arange(1, 3))


class Seen(LoadAware):
    """The policy, with what it submits."""

    def __init__(self):
        super().__init__(COSTS, READ_OUT, SAMPLE, max_tokens=2)
        self.submitted = set()

    def admit(self, drafts):
        counts = super().admit(drafts)
        self.submitted |= set(zip(drafts.lengths.tolist(), counts.tolist(), strict=True))
        return counts


class AfterTheFact(Seen):
    """Submits as many tokens of each row as are worth most, by what is predicted once they were sampled."""

    def admit(self, drafts):
        if not drafts.longest:
            return drafts.lengths
        survival = self.read_out.after(drafts).cumprod(axis=1)
        gains = np.where(drafts.places, survival - 0.55, -np.inf).cumsum(axis=1)
        best = np.concatenate([np.zeros((drafts.num_requests, 1)), gains], axis=1).argmax(axis=1)
        self.submitted |= set(zip(drafts.lengths.tolist(), best.tolist(), strict=True))
        return best


def target_distribution(prompt):
    """Return the target's distribution of the next tokens, (V, V, V), by enumeration."""
    texts = torch.tensor([[*prompt, *tokens] for tokens in itertools.product(range(3), repeat=NUM_TOKENS)])
    logits = PAIR.target(texts).logits[:, len(prompt) - 1 : -1].log_softmax(dim=-1)
    return logits.gather(2, texts[:, len(prompt) :, None]).sum(dim=(1, 2)).exp().reshape((3,) * NUM_TOKENS)


def p_values(policy):
    """Return the p-value of each prompt's responses, in batches of three rows."""
    decoder = SpeculativeDecoder(PAIR, engine="eager", window=16)
    counts = torch.zeros(len(PROMPTS), *(3,) * NUM_TOKENS)
    requests = PROMPTS * NUM_REQUESTS
    for number, made in decoder.generate_batch(requests, 3, NUM_TOKENS, range(len(requests)), (), policy):
        counts[(number % len(PROMPTS), *made.tokens.tolist())] += 1
    return [
        chi_square_p_value(of_prompt.flatten(), target_distribution(prompt).flatten())
        for of_prompt, prompt in zip(counts, PROMPTS, strict=True)
    ]


def test_a_policy_that_knows_the_load_keeps_the_distribution_of_every_row():
    policy = Seen()
    values = p_values(policy)
    assert {(1, 0), (1, 1), (2, 1), (2, 2)} <= policy.submitted  # it does choose
    assert min(values) > 1e-6, values  # three tests: false alarm with probability 3e-6


def test_a_policy_that_looks_at_tokens_first_is_seen():
    policy = AfterTheFact()
    values = p_values(policy)
    assert {(2, 0), (2, 2)} <= policy.submitted
    assert min(values) < 1e-9, values
