"""Theory of papers: an exact test of each formula, and the claims that follow from them."""

import itertools
from math import inf

import pytest
import torch
import yaml

from benchmarks.papers import theory
from benchmarks.papers.chains import (
    Chains,
    bias,
    emitted,
    every_draft,
    residual,
    tokens_per_round,
    total_variation,
)
from benchmarks.papers.rejections import (
    after_batch,
    expected_rejections,
    fewest_rejections,
    least_bias,
    simulated_rejections,
)
from benchmarks.papers.rounds import (
    accepted_error,
    largest,
    most_likely_blocks,
    most_tokens_per_round,
    tokens_after,
)
from benchmarks.papers.stopping import (
    AcceptanceChain,
    automatic_threshold,
    fewest_calls,
    first_stop,
    optimal_stopping,
    speed,
    speed_at,
)
from specheads.decoding.step_costs import StepCosts
from specheads.decoding.verification import BlockVerification, TokenVerification
from specheads.papers import BiasedVerification

RULES = [TokenVerification(), BlockVerification()]


def chains(seed=0, num_positions=4, vocab_size=3):
    generator = torch.Generator().manual_seed(seed)
    return Chains.random(num_positions, vocab_size, generator, sharpness=1.5)


@pytest.mark.parametrize(
    "subject",
    [
        each
        for each in theory.SUBJECTS
        if each.__name__ not in ("simulation", "thresholds", "verification_rules")
    ],
)
def test_claims_hold(subject):
    """Those that take seconds; benchmarks/papers/claims/theory.json has all."""
    texts = yaml.safe_load(theory.TEXTS.read_text())
    for answer in subject(torch.Generator().manual_seed(0)):
        assert answer.name in texts and answer.ours
        assert answer.holds or answer.name == "joint_choice"


# --- rejections


def test_one_draft_is_rejected_by_the_total_variation():
    """Summed over all texts, weighted by the target's probability of what came before."""
    known = chains()
    total = 0.0
    for length in range(4):
        for text in itertools.product(range(3), repeat=length):
            probability = 1.0
            last = 0
            for place, token in enumerate(text):
                probability *= known.target[place, last, token].item()
                last = token
            distance = total_variation(known.target[length, last], known.draft[length, last])
            total += probability * distance.item()
    assert expected_rejections(known) == pytest.approx(total, rel=1e-12)
    assert fewest_rejections(known) == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("num_drafts", [1, 2, 5])
def test_what_is_rejected_and_what_is_accepted_make_the_target(num_drafts):
    """By enumeration of the sampled tokens and of each one's outcome."""
    target, draft = chains(3, 2, 4).target[:, 0]
    accepted = torch.zeros(4, dtype=torch.float64)
    replaced = torch.zeros(4, dtype=torch.float64)
    for tokens in itertools.product(range(4), repeat=num_drafts):
        chance = draft[list(tokens)].prod()
        left = target
        for token in tokens:
            passes = min(1.0, (left[token] / draft[token]).item())
            accepted[token] += chance * passes
            chance = chance * (1 - passes)
            left = residual(left, draft)
        replaced += chance * left
    torch.testing.assert_close((accepted, replaced), after_batch(target, draft, num_drafts))
    torch.testing.assert_close(accepted + replaced, target)


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_a_million_simulated_tokens_agree(num_drafts):
    """Within 5 standard errors: by chance not once in a million."""
    known = chains(0, 50, 7)
    generator = torch.Generator().manual_seed(1)
    counts = simulated_rejections(known, num_drafts, 20_000, generator).double()
    error = counts.std().item() / len(counts) ** 0.5
    assert abs(counts.mean().item() - expected_rejections(known, num_drafts)) < 5 * error


def test_more_drafts_are_rejected_less_down_to_a_limit():
    known = Chains.random(10, 7, torch.Generator().manual_seed(0))
    rejections = [expected_rejections(known, number) for number in (1, 2, 4, 8, 16)]
    assert rejections == sorted(rejections, reverse=True) and rejections[0] > rejections[-1] * 1.05
    limit = expected_rejections(known, inf)
    assert 0 < limit < rejections[-1]
    assert expected_rejections(known, 2000) == pytest.approx(limit, rel=1e-3)


def test_the_least_bias_is_none_for_unbiased_rules_and_all_for_those_that_accept_everything():
    target = chains(2).target[0, 0]
    draft = chains(2).draft[0, 0]
    unbiased = least_bias(target, draft, (target / draft).clamp_max(1))
    assert unbiased.item() == pytest.approx(0, abs=1e-12)
    everything = least_bias(target, draft, torch.ones(3).double())
    assert everything.item() == pytest.approx(total_variation(target, draft).item())


# --- rounds


@pytest.mark.parametrize("num_drafted", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_lossless_rules_emit_the_targets_tokens_and_a_biased_one_is_noticed(rule, num_drafted):
    known = chains(num_drafted)
    assert emitted(rule, known, num_drafted).sum().item() == pytest.approx(1)
    assert bias(rule, known, num_drafted) < 1e-9
    assert bias(BiasedVerification(eps=0.3), known, num_drafted) > 0.01


@pytest.mark.parametrize(("vocab_size", "num_drafted"), [(2, 2), (2, 3), (3, 2)])
def test_no_lossless_rule_emits_more_than_block_verification(vocab_size, num_drafted):
    """Sun et al. 2024, theorem 2, by a linear programme in exact fractions.

    The bound of all is the most over all joint distributions of a draft and a text of the target
    (equations 35 to 37).
    """
    known = chains(7, num_drafted + 1, vocab_size)
    token, block, most = (tokens_after(rule, known, num_drafted, 1) for rule in (*RULES, None))
    assert block == pytest.approx(most, abs=1e-12) and token < most - 1e-4
    assert block == pytest.approx(tokens_per_round(RULES[1], known, num_drafted), abs=1e-12)
    draft, texts = every_draft(known, num_drafted)
    same = (texts.tokens[:, None] == texts.tokens).cumprod(dim=2).sum(dim=2).double()
    eye = torch.eye(len(draft)).double()
    ones = torch.ones(1, len(draft)).double()
    marginals = torch.cat([draft, texts.drafted_probs()[1].prod(dim=1)])
    rows = torch.cat([torch.kron(eye, ones), torch.kron(ones, eye)])
    bound = 1 + largest(same.flatten(), rows, marginals)
    assert bound == pytest.approx(most_tokens_per_round(known, num_drafted), abs=1e-12)
    assert most <= bound + 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_tokens_after_two_rounds_are_those_of_all_texts(rule):
    """The same sum by the distribution of what a round emits: kept tokens and the next one."""
    known = chains(2, 6, 2)
    probability, block = every_draft(known, 2)
    distribution = rule.distribution(block)
    expected = 0.0
    for row, kept in itertools.product(range(4), range(3)):
        weights = distribution.next_probs(torch.full_like(block.lengths, kept))[row].double()
        for token, share in enumerate((weights / weights.sum()).tolist()):
            chance = (probability[row] * distribution.length_probs[row, kept]).item() * share
            later = known.after(kept + 1, token)
            expected += chance * (kept + 1 + tokens_per_round(rule, later, 2))
    assert tokens_after(rule, known, 2, 2) == pytest.approx(expected, abs=1e-9)


def test_the_error_of_what_joint_verification_accepts():
    """Ratios 0.5 and 0.25 of one draft, 1.5 and more of the others: the first is the worst that
    passes at 0.4, both at 0.2.
    """
    target = torch.tensor([0.25, 0.75], dtype=torch.float64)
    draft = torch.tensor([0.5, 0.5], dtype=torch.float64)
    known = Chains.constant(target, draft, 3)
    errors = [accepted_error(known, 2, threshold) for threshold in (0.4, 0.2, 0.9)]
    assert errors == pytest.approx([1, 3, 0])


def test_the_most_likely_block_is_greedy_for_one_token_and_the_best_text_for_all():
    for seed in range(5):
        logs = chains(seed, 4, 2).target.log()
        nats = {}
        for text in itertools.product(range(2), repeat=4):
            steps = zip(logs, (0, *text), text, strict=False)
            nats[text] = sum(log[before, token].item() for log, before, token in steps)
        last = 0
        greedy = []
        for log in logs:
            last = int(log[last].argmax())
            greedy.append(last)
        known = chains(seed, 4, 2)
        assert most_likely_blocks(known, 4, 4) == pytest.approx(max(nats.values()))
        assert most_likely_blocks(known, 4, 1) == pytest.approx(nats[tuple(greedy)])


# --- stopping


def enumerated(chain, draft_seconds, max_tokens):
    """Return the highest throughput of all policies that decide by the bins of all tokens so
    far.
    """
    bins = range(len(chain.values))
    histories = [path for n in range(1, max_tokens) for path in itertools.product(bins, repeat=n)]
    best = 0.0
    for goes_on in itertools.product((False, True), repeat=len(histories)):
        policy = dict(zip(histories, goes_on, strict=True))
        tokens = 1.0
        seconds = 1.0
        reached = [((bin,), float(chain.first[bin]), float(chain.values[bin])) for bin in bins]
        while reached:
            path, chance, survival = reached.pop()
            tokens += chance * survival
            seconds += chance * draft_seconds
            if policy.get(path, False):
                for b in bins:
                    longer = chance * float(chain.following[path[-1], b])
                    reached.append(((*path, b), longer, survival * float(chain.values[b])))
        best = max(best, tokens / seconds)
    return best


@pytest.mark.parametrize(("values", "ratio"), [((0.2, 0.9), 2), ((0.0, 1.0), 5), ((0.5, 0.7), 10)])
def test_the_best_policy_is_that_of_all_policies_enumerated(values, ratio):
    chain = AcceptanceChain.of(values, (0.4, 0.6), ((0.7, 0.3), (0.2, 0.8)))
    solved = optimal_stopping(chain, StepCosts.at_ratio(ratio), max_tokens=4)
    assert solved.throughput == pytest.approx(enumerated(chain, 1 / ratio, 4), rel=1e-4)


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_independent_tokens_are_best_drafted_in_one_length(acceptance):
    chain = AcceptanceChain.of([acceptance], [1.0], [[1.0]])
    costs = StepCosts.at_ratio(8)
    solved = optimal_stopping(chain, costs, max_tokens=20)
    drafts = torch.full((1, 20), acceptance, dtype=torch.float64)
    survival = drafts.cumprod(dim=1)
    speeds = [speed(survival, torch.tensor([length]), costs) for length in range(1, 21)]
    assert solved.throughput == pytest.approx(max(speeds), rel=1e-4)
    assert speeds[solved.lengths(drafts, chain).item() - 1] == max(speeds)
    assert speed_at(survival, automatic_threshold(drafts, costs), costs) > 0.95 * max(speeds)


def test_drafts_end_with_the_token_that_crosses_the_threshold():
    drafts = torch.tensor([[0.9, 0.5, 0.9], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9]], dtype=torch.float64)
    survival = drafts.cumprod(dim=1)
    assert first_stop(1 - survival > 0.5).tolist() == [2, 3, 1]
    costs = StepCosts.at_ratio(2)
    assert speed(survival, torch.tensor([1, 1, 1]), costs) == pytest.approx((3 + 1.9) / 4.5)


def test_the_fewest_calls_are_those_of_the_lemma():
    assert fewest_calls([False] * 5) == (1, 0)
    assert fewest_calls([False, True, False, True, False]) == (3, 0)
    assert fewest_calls([False, False, True]) == (1, 0)  # the call's next token ends the text
