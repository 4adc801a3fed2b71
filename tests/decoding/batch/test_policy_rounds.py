"""Policies decide live how much rows draft and submit; what a row emits stays the target's."""

import numpy as np
import pytest
import torch
from fakes import tiny_pair

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, UserError, Warp, stopping, verification
from specheads.decoding.batch.observation import ACCEPTANCE, OVERLAP
from specheads.decoding.load.costs import LoadCosts, SecondsTable
from specheads.decoding.load.lengths import FixedK
from specheads.decoding.load.load_aware import LoadAware, LoadBound
from specheads.decoding.load.plan import SurvivalSample
from specheads.decoding.load.readout import LogisticAcceptance, ReadOut
from specheads.decoding.load.stopping_rule import EachByRule, UntilStopped
from specheads.features import drafting_features

GREEDY, SAMPLED = Warp(temperature=0), Warp(top_k=4)
PROMPTS = [[1, 2, 3], [4], [5, 6, 0, 3, 2, 1, 4], [1, 2], [3, 1, 2, 1]]
SEEDS = [3, 1, 4, 1, 5]
# Draft steps cost next to nothing; from eight tokens on every token in flight costs as much as a third of a step.
COSTS = LoadCosts(SecondsTable((1, 64), (0.01, 0.02)), SecondsTable((1, 8, 64), (1.0, 1.0, 20.0)))
READ_OUT = ReadOut(LogisticAcceptance({"max_prob": 2.0, "bias": -1.0}), LogisticAcceptance({"log_draft_prob": 1.0, "bias": 1.0}))


def survival_sample():
    return SurvivalSample(np.linspace(0.2, 0.9, 12)[:, None] ** np.arange(1, 6))


def decode(decoder, policy, max_batch=3, head=None, prompts=PROMPTS):
    done = dict(decoder.generate_batch(prompts, max_batch, 25, SEEDS[: len(prompts)], policy=policy, head=head))
    return [done[number] for number in range(len(prompts))]


def head_of(**values):
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(16, depth=1, **values)).double().requires_grad_(False)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    return head


@pytest.mark.parametrize("warp", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (FixedK(3), stopping.FixedLength(3)),
        (EachByRule(stopping.DraftProduct(0.6, max_tokens=5)), stopping.DraftProduct(0.6, max_tokens=5)),
        (EachByRule(stopping.Heuristic(start=2, max_tokens=5)), stopping.Heuristic(start=2, max_tokens=5)),
        (UntilStopped(5), stopping.OnlineLogistic(threshold=0.6, max_tokens=5)),
        (UntilStopped(5), stopping.HeadThreshold(head_of(), 0.6, max_tokens=5)),
        (UntilStopped(5), stopping.HeadThreshold(head_of(inputs=("hidden", "target_hidden"), target_size=16), 0.6, max_tokens=5)),
    ],
    ids=["fixed", "by a rule", "by a rule that learns", "stopped and learning", "stopped by a head", "by the target's state"],
)
def test_a_policy_that_does_as_a_rule_emits_the_same_tokens(policy, rule, warp):
    decoder = SpeculativeDecoder(tiny_pair(vocab_size=7, scale=2.0), stopping=rule, warp=warp, engine="eager")
    expected = [decoder.generate(prompt, 25, seed) for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    for one, other in zip(expected, decode(decoder, policy), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert [r.num_drafted for r in one.rounds] == [r.num_drafted for r in other.rounds]


def policies():
    return {
        "load-aware": LoadAware(COSTS, READ_OUT, survival_sample()),
        "bound": LoadBound(FixedK(5), COSTS, READ_OUT, survival_sample()),
        "bound on a rule": LoadBound(UntilStopped(5), COSTS, READ_OUT, survival_sample()),
        "no drafts": FixedK(0),
    }


@pytest.mark.parametrize("name", ["load-aware", "bound", "bound on a rule", "no drafts"])
def test_greedy_rows_are_the_targets_whatever_a_policy_does(name):
    pair = tiny_pair(vocab_size=7, scale=2.0)
    decoder = SpeculativeDecoder(pair, warp=GREEDY, engine="eager")
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = pair.target.generate(ids, attention_mask=mask, max_new_tokens=25, do_sample=False, pad_token_id=0)
        expected.append(out[0, len(prompt) :].tolist())
    for max_batch in (1, 5):
        rows = decode(decoder, policies()[name], max_batch)
        assert [row.tokens.tolist() for row in rows] == expected
        assert any(row.stats.num_drafted for row in rows) == (name != "no drafts")


class Recording(FixedK):
    """A fixed length that keeps the drafts of every round, and submits all of a row's tokens but its last."""

    needs = frozenset({ACCEPTANCE, OVERLAP, "max_prob", "draft_prob"})

    def __init__(self, num_tokens):
        super().__init__(num_tokens)
        self.outcomes = []

    def admit(self, drafts):
        return np.maximum(drafts.lengths - 1, 0)

    def learn(self, drafts, num_submitted, num_accepted, seconds):
        assert seconds > 0
        self.outcomes.append((drafts, num_submitted, num_accepted))


def test_a_policy_sees_the_features_of_training_and_what_became_of_its_tokens():
    pair, policy, head = tiny_pair(vocab_size=7, scale=2.0, same=True), Recording(4), head_of(overlap=True)
    decoder = SpeculativeDecoder(pair, warp=GREEDY, engine="eager")
    (row,) = decode(decoder, policy, 2, head, PROMPTS[2:3])
    text, places = [*PROMPTS[2], *row.tokens.tolist()], 0
    for (drafts, num_submitted, num_accepted), made in zip(policy.outcomes, row.rounds, strict=True):
        assert (made.num_drafted, made.num_accepted) == (drafts.lengths[0], num_accepted[0])
        assert num_submitted[0] == max(drafts.lengths[0] - 1, 0) >= num_accepted[0]
        committed = len(PROMPTS[2]) + places
        for place in range(num_accepted[0]):
            tokens = torch.tensor([text[: committed + place]])
            hidden = pair.draft_lm.hidden_states(tokens)[:, -1]
            drafted = torch.tensor([text[committed + place]])
            logits = pair.draft_lm.logits(hidden)
            features = drafting_features(head.config.inputs, logits, drafted, hidden, pair.draft_lm.embed)
            assert drafts.features["max_prob"][0, place] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-9)
            assert drafts.features[ACCEPTANCE][0, place] == pytest.approx(float(head(features)), abs=1e-9)
            assert drafts.features[OVERLAP][0, place] == pytest.approx(float(head.overlap_logit(features)), abs=1e-9)
        places += len(made.tokens)
    assert sum(made.num_accepted for made in row.rounds) > 10


class Outcomes(stopping.FixedLength):
    """A fixed length that keeps what it was told of every round."""

    def end_round(self, state, num_drafted, num_accepted):
        self.rounds.append((num_drafted.tolist(), num_accepted.tolist()))
        return state


def test_a_rule_with_a_bound_learns_of_the_submitted_tokens_only():
    """What was drafted, but not submitted, has no outcome."""
    rule, spied = Outcomes(4), []
    rule.rounds = []

    class Spy(LoadBound):
        def admit(self, drafts):
            spied.append((drafts.lengths.tolist(), super().admit(drafts).tolist()))
            return np.array(spied[-1][1])

    decoder = SpeculativeDecoder(tiny_pair(vocab_size=7, scale=2.0), stopping=rule, warp=SAMPLED, engine="eager")
    decode(decoder, Spy(UntilStopped(4), COSTS, READ_OUT, survival_sample()), prompts=PROMPTS[:3])
    first = [sorted(numbers[:3]) for numbers, _ in rule.rounds[:3]]
    assert first == [sorted(submitted) for _, submitted in spied[:3]] and len(rule.rounds) == sum(
        any(drafted) for drafted, _ in spied
    )
    assert spied[0][0] == [4, 4, 4] and sum(spied[0][1]) < 12


def test_mistakes_get_one_message():
    pair = tiny_pair(vocab_size=7)
    decoder = SpeculativeDecoder(pair, engine="eager")
    with pytest.raises(UserError, match="a policy needs head_acceptance, but there is no head; give head="):
        decode(decoder, Recording(2))
    old = AcceptanceHead(HeadConfig(16, depth=1)).double()
    with pytest.raises(UserError, match="does not predict the expected acceptance before"):
        decode(decoder, Recording(2), head=old)
    decoder = SpeculativeDecoder(pair, verification=verification.GreedyBlockVerification(), engine="eager")
    with pytest.raises(UserError, match="a policy on the load goes with verification=token or block"):
        decode(decoder, FixedK(2))


class Late(FixedK):
    """Drafts nothing in the first rounds of a prompt, and in some later ones."""

    def length(self, drafts):
        self.num_rounds = getattr(self, "num_rounds", 0) + 1
        return self.max_tokens if self.num_rounds > 10 and self.num_rounds % 12 else 0


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
