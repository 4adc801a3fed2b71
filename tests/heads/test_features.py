"""The feature table: what it computes, and that every module takes a feature from it alone."""

from dataclasses import replace

import pytest
import torch
from fakes import needs_compiler, tiny_pair

from specheads import AcceptanceHead, HeadConfig, SpeculativeDecoder, Warp, load_pair, stopping
from specheads.heads.config import KNOWN_INPUTS
from specheads.heads.features import FEATURES, RECORDED, drafting_features
from specheads.pair.draft_vocabulary import keep_tokens

DISTRIBUTION = ("draft_prob", "max_prob", "entropy", "second_prob")


def by_definition(logits, token):
    """The features of a distribution from the softmax itself."""
    probs = logits.softmax(dim=-1)
    return {
        "draft_prob": probs.gather(-1, token[..., None]).squeeze(-1),
        "max_prob": probs.amax(dim=-1),
        "entropy": torch.special.entr(probs).sum(dim=-1),
        "second_prob": probs.sort(dim=-1, descending=True).values[..., 1],
    }


def test_features_of_the_distribution_are_those_of_the_softmax():
    logits = torch.randn(4, 3, 50, dtype=torch.float64) * 20
    logits[..., 7] = -torch.inf
    logits[2, :, 5:] = -torch.inf  # a draft with an output over five tokens, some drafted by others
    logits[0, 0, 4:6] = 99.0  # two tokens are equally likely
    token = torch.randint(50, (4, 3))
    features = drafting_features(DISTRIBUTION, logits, token)
    for name, expected in by_definition(logits, token).items():
        assert torch.allclose(features[name], expected, atol=1e-12, rtol=1e-12), name
    assert features["second_prob"][0, 0] == features["max_prob"][0, 0]


def test_every_known_input_of_a_head_is_a_feature():
    for names in KNOWN_INPUTS.values():
        assert set(names) <= set(FEATURES)
    # One that differs between the tokens of a position is not known where the head reads its state.
    assert not [name for name in KNOWN_INPUTS["input_token"] if FEATURES[name].of_token]


def test_features_of_half_precision_are_computed_in_float32():
    logits = (torch.randn(2, 1000) * 5).bfloat16()
    features = drafting_features(DISTRIBUTION, logits, torch.tensor([3, 999]))
    assert {value.dtype for value in features.values()} == {torch.float32}
    assert torch.allclose(
        features["entropy"],
        torch.special.entr(logits.float().softmax(dim=-1)).sum(dim=-1),
        atol=1e-5,
    )


def test_an_impossible_second_token_enters_with_a_finite_logarithm():
    logits = torch.full((2, 5), -torch.inf)
    logits[:, 3] = 0.0
    head = AcceptanceHead(HeadConfig(4, depth=0, inputs=("second_prob",)))
    features = drafting_features(head.config.inputs, logits, torch.tensor([3, 3]))
    assert features["second_prob"].tolist() == [0.0, 0.0]
    assert torch.equal(head.assemble(features), torch.full((2, 1), 1e-12).log())


# --- features through training and decoding


@needs_compiler
@pytest.mark.full
def test_compiled_steps_read_the_second_probability_as_eager_ones_do():
    torch.manual_seed(0)
    head = AcceptanceHead(
        HeadConfig(16, 1, inputs=("hidden", "second_prob"), width=8)
    ).requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight, std=2.0)
    rounds = []
    for engine in ("eager", "compiled"):
        rule = stopping.HeadThreshold(head, 0.5, max_tokens=6)
        decoder = SpeculativeDecoder(
            tiny_pair(7, scale=1.5), stopping=rule, warp=Warp(top_k=3), engine=engine
        )
        outputs = [decoder.generate([0, 1, 2], 40, seed=seed) for seed in range(3)]
        rounds.append(
            [(r.num_drafted, r.num_accepted, *r.tokens) for out in outputs for r in out.rounds]
        )
    assert rounds[0] == rounds[1] and len({drafted for drafted, *_ in rounds[0]}) > 2


def test_sums_over_the_tokens_of_a_cut_output_are_those_over_all():
    pair = load_pair("nano", dtype="float64")
    keep_tokens(pair.draft, torch.tensor([0, 1, 7, 30, 500]))
    lm = replace(pair).draft_lm
    hidden = torch.randn(6, pair.draft_lm.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = lm.logits(hidden.double())
    tokens = torch.tensor([0, 1, 7, 30, 500, 0])
    whole = drafting_features(RECORDED, logits, tokens)
    for name, values in drafting_features(
        RECORDED, logits, tokens, kept_tokens=lm.kept_tokens
    ).items():
        torch.testing.assert_close(values, whole[name], rtol=1e-12, atol=1e-12)
