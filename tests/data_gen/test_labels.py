import bisect
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import all_logits, cut, tiny_pair
from statistics_helper import chi_square_p_value

from specheads.data_gen import shard_rows
from specheads.data_gen.shard_rows import LABELS, label_responses
from specheads.pair.sampling import Warp

WARPS = [Warp(0), Warp(1.0), Warp(0.7, top_k=5), Warp(1.0, top_p=0.8)]
LENGTHS = [(3, 9), (11, 1), (1, 14), (6, 6), (2, 2), (9, 11)]  # of prompt and response, in no order


def random_texts(lengths=LENGTHS, vocab_size=12, seed=0):
    generator = np.random.default_rng(seed)
    return tuple(
        [generator.integers(vocab_size, size=pair[i]).tolist() for pair in lengths] for i in (0, 1)
    )


def uniform(count, length, seed=1, uniforms=2):
    return np.random.default_rng(seed).random((count, uniforms, length))


def distributions(model, prefix, warp, vocab_size):
    """The warped law behind a prefix, from a forward over just that prefix, as a list of floats."""
    return warp(all_logits(model, torch.tensor([prefix]))[0, -1, :vocab_size]).tolist()


def reference(pair, prompt, response, uniforms, warp):
    """Labels by their definitions: one forward per position and model, no batch, no padding, no
    slices.
    """
    made = {name: [[] for _ in uniforms[1:]] if name.startswith("more_") else [] for name in LABELS}
    for i in range(len(response)):
        prefix = [*prompt, *response[:i]]
        t, d = (
            distributions(model, prefix, warp, pair.vocab_size)
            for model in (pair.target, pair.draft)
        )
        drafted, *others = (
            bisect.bisect_right(list(itertools.accumulate(d)), draw[i]) for draw in uniforms
        )
        made["draft_ids"].append(drafted)
        made["accept_prob"].append(min(1.0, t[drafted] / d[drafted]))
        for number, other in enumerate(others):
            made["more_draft_ids"][number].append(other)
            made["more_accept_prob"][number].append(min(1.0, t[other] / d[other]))
    return made


def assert_same(made, expected, tolerance=1e-10):
    for name, value in expected.items():
        if name.endswith("draft_ids"):
            assert made[name] == value
        elif name == "more_accept_prob":
            for draw, expected_draw in zip(made["more_accept_prob"], value, strict=True):
                assert draw == pytest.approx(expected_draw, rel=tolerance, abs=tolerance)
        else:
            assert made[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("kept", [range(12), (1, 5, 6, 11)], ids=["whole", "cut"])
@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_labels_equal_their_definitions(warp, kept):
    pair = cut(tiny_pair(12, scale=2.0), kept)
    (prompts, responses) = random_texts()
    uniforms = uniform(6, 14)
    made = label_responses(pair, prompts, responses, uniforms, warp)
    assert len(made) == 6
    for row in range(6):
        assert_same(made[row], reference(pair, prompts[row], responses[row], uniforms[row], warp))
    # both outcomes occur, so the comparison says something of either
    accepted = [value for labels in made for value in labels["accept_prob"]]
    assert min(accepted) < 0.5 and max(accepted) == 1


# --- batches, slices and padding change nothing


@pytest.mark.parametrize(("tokens", "elements"), [(1, 12), (16, 36), (40, 84), (40, 1)])
def test_small_batches_and_slices_have_the_labels_of_each_text_alone(monkeypatch, tokens, elements):
    pair = tiny_pair(12)
    prompts, responses = random_texts()
    uniforms = uniform(6, 14)
    warp = Warp(1.0, top_k=5)
    alone = []
    for row in range(6):
        one = slice(row, row + 1)
        alone += label_responses(pair, prompts[one], responses[one], uniforms[one], warp)
    together = label_responses(pair, prompts, responses, uniforms, warp)
    monkeypatch.setattr(shard_rows, "SLICE_ELEMENTS", elements)
    monkeypatch.setattr(shard_rows, "BATCH_TOKENS", tokens)
    made = label_responses(pair, prompts, responses, uniforms, warp)
    for row in range(6):
        assert_same(together[row], alone[row], 1e-12)
        assert_same(made[row], alone[row], 1e-12)


# --- the distribution of the drafted tokens


def test_drafted_tokens_follow_the_drafts_warped_distribution():
    # Fixed numbers; for new ones each of the two comparisons fails by chance once in a million.
    pair = tiny_pair(8)
    warp = Warp(0.9, top_k=6)
    count = 8192
    prompt = [3, 1]
    response = [4, 2]
    made = label_responses(
        pair, [prompt] * count, [response] * count, uniform(count, 2, seed=5), warp
    )
    for i in range(2):
        distribution = torch.tensor(distributions(pair.draft, [*prompt, *response[:i]], warp, 8))
        counts = torch.bincount(
            torch.tensor([labels["draft_ids"][i] for labels in made]), minlength=8
        )
        assert chi_square_p_value(counts, distribution) > 1e-6


def test_logits_of_a_padded_vocabulary_are_left_out():
    wide = tiny_pair(12)
    # Both models have three logits that no token uses
    narrow = replace(wide, tokenizer=tiny_pair(9).tokenizer)
    prompts, responses = random_texts(vocab_size=9)
    uniforms = uniform(6, 14)
    made = label_responses(narrow, prompts, responses, uniforms, Warp())
    assert max(token for labels in made for token in labels["draft_ids"]) == 8
    for row in range(6):
        assert_same(
            made[row], reference(narrow, prompts[row], responses[row], uniforms[row], Warp())
        )
