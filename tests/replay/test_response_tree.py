from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import all_logits, cut, tiny_pair
from families import CONFIGS, CUT, family_pair
from statistics_helper import chi_square_p_value

from specheads import Warp
from specheads.decoding import branches
from specheads.decoding.branches import Branches, TextReader
from specheads.heads.features import RECORDED, drafting_features
from specheads.replay.response_tree import (
    COLUMNS,
    LEAST_SURVIVAL,
    RecordSettings,
    ResponseToRecord,
    branch_probs,
    node_states,
    record_responses,
    response_probs,
)

PROMPT = [2, 0, 1]
RESPONSE = [1, 1, 0, 2, 0, 1, 2, 2, 0, 1]


def record(
    pair,
    warp,
    response=RESPONSE,
    prompt=PROMPT,
    num_samples=3,
    max_tokens=5,
    batch_size=4,
    limit=None,
    seed=0,
):
    settings = RecordSettings(num_samples, max_tokens)
    text = ResponseToRecord.of(prompt, response, limit or len(response), settings, seed, "ab")
    (row,) = record_responses(pair, [text], warp, batch_size * (len(text.read) + max_tokens))
    return row


def branches_of(row):
    """Branches as (sample, start, tokens), and the first node of each."""
    ends = np.cumsum(row["branch_length"])
    parts = np.split(row["branch_ids"], ends)[:-1]
    return list(
        zip(
            row["branch_draw"],
            row["branch_start"],
            parts,
            len(row["response_ids"]) + ends - row["branch_length"],
            strict=True,
        )
    )


def logits_after(model, text):
    return all_logits(model, torch.tensor([text]))[0, -1]


@pytest.mark.parametrize("name", [*CONFIGS, CUT])
@pytest.mark.parametrize("warp", [Warp(0), Warp(0.7, top_k=5)], ids=["greedy", "sampled"])
def test_every_node_agrees_with_plain_forward_passes(name, warp):
    """Tokens that the draft could have drawn and features to 1e-6 (they are kept in float32), all
    families, past the window.
    """
    pair = family_pair(name)
    generator = np.random.default_rng(3)
    prompt = generator.integers(29, size=9).tolist()
    response = generator.integers(29, size=14).tolist()
    row = record(pair, warp, response, prompt)
    nodes = [(number, prompt + response[:number], token) for number, token in enumerate(response)]
    for _, start, tokens, node in branches_of(row):
        nodes += [
            (node + k, [*prompt, *response[:start], *tokens[:k]], token)
            for k, token in enumerate(tokens)
        ]
    assert len(nodes) == len(row["entropy"])
    for node, text, token in nodes:
        logits = logits_after(pair.draft, text)[None]
        for key, value in drafting_features(RECORDED, logits, torch.tensor([token])).items():
            assert row[key][node] == pytest.approx(value.item(), abs=1e-6)
        assert row["law_prob"][node] == pytest.approx(warp(logits)[0, token].item(), abs=1e-6)
        if node >= len(response):
            assert row["law_prob"][node] > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_states_of_nodes_are_those_of_plain_forward_passes(name):
    pair = family_pair(name)
    generator = np.random.default_rng(4)
    prompt = generator.integers(29, size=7).tolist()
    response = generator.integers(29, size=12).tolist()
    start = torch.tensor([0, 3, 3, 9, 11])
    lengths = torch.tensor([4, 1, 6, 5, 2])
    tokens = torch.from_numpy(generator.integers(29, size=(5, 6)))
    branches = Branches(start * 0, len(prompt) + start, tokens, lengths)
    nodes = list(node_states(TextReader(pair.target_lm), prompt, response, branches))
    all_tokens = torch.cat([part.tokens for part in nodes])
    states = torch.cat([part.hidden for part in nodes])
    texts = [prompt + response[:i] for i in range(len(response))]
    expected = list(response)
    for b in range(5):
        branch = tokens[b, : lengths[b]].tolist()
        texts += [prompt + response[: start[b]] + branch[:k] for k in range(len(branch))]
        expected += branch
    assert all_tokens.tolist() == expected
    for text, state in zip(texts, states, strict=True):
        reference = pair.target_lm.hidden_states(torch.tensor([text]), use_cache=False)[0, -1]
        # These compute attention in float32 whatever their weights are
        tolerance = 1e-5 if name in ("bloom", "gemma2") else 1e-10
        torch.testing.assert_close(state, reference, rtol=0, atol=tolerance)


@pytest.mark.parametrize("warp", [Warp(0.7, top_k=5), Warp(1.5)], ids=["some", "all"])
def test_the_target_reads_branches_as_far_as_their_tokens_may_survive(warp):
    pair = family_pair("llama")
    generator = np.random.default_rng(5)
    prompt = generator.integers(29, size=9).tolist()
    response = generator.integers(29, size=14).tolist()
    row = record(pair, warp, response, prompt, max_tokens=12, limit=40)
    pieces = np.split(row["branch_ids"], np.cumsum(row["branch_length"]))[:-1]
    tokens = torch.zeros(len(pieces), 12, dtype=torch.long)
    for number, piece in enumerate(pieces):
        tokens[number, : len(piece)] = torch.from_numpy(piece)
    start, lengths = (
        torch.from_numpy(row[f"branch_{name}"]).long() for name in ("start", "length")
    )
    branches = Branches(start * 0, len(prompt) + start, tokens, lengths)
    draft_prob = torch.from_numpy(row["law_prob"])[len(response) :]
    reader = TextReader(pair.target_lm)
    of_response = response_probs(reader, warp, prompt, response)
    found = torch.cat([of_response, branch_probs(reader, warp, branches, draft_prob)])
    texts = [(prompt + response[:i], token, 1.0) for i, token in enumerate(response)]
    num_read = 0
    for node, (text, token, _) in enumerate(texts):
        assert found[node].item() == pytest.approx(
            warp(logits_after(pair.target, text))[token].item(), abs=1e-6
        )
    for _, start, branch, first in branches_of(row):
        survival = 1.0
        for k, token in enumerate(branch):
            expected = warp(logits_after(pair.target, [*prompt, *response[:start], *branch[:k]]))[
                token
            ].item()
            if survival >= LEAST_SURVIVAL or found[first + k] > 0:
                assert found[first + k].item() == pytest.approx(expected, abs=1e-6)
            num_read += int(found[first + k] > 0)
            survival *= min(1.0, expected / row["law_prob"][first + k])
    assert 0 < num_read < len(row["branch_ids"]) or warp.top_k == 0


def test_greedy_branches_are_the_drafts_own_greedy_text_where_the_models_differ():
    pair = family_pair("llama")
    response = []
    text = [4, 7, 1]
    for _ in range(20):
        response.append(logits_after(pair.target, [*text, *response]).argmax().item())
    row = record(pair, Warp(0), response, text, num_samples=1)
    same = [
        logits_after(pair.draft, text + response[:i]).argmax().item() == token
        for i, token in enumerate(response)
    ]
    assert row["accepted"].tolist() == same and 0 < sum(same) < 20
    # What the limit ends is not drafted
    assert row["branch_start"].tolist() == [i for i in range(19) if not same[i]]
    for _, start, tokens, _ in branches_of(row):
        read = text + response[:start]
        for token in tokens:
            assert token == logits_after(pair.draft, read).argmax().item()
            read.append(int(token))
        assert len(tokens) == min(5, 19 - start)


@pytest.mark.parametrize(
    ("kept", "num_followed"), [((0, 1, 2), 5), ((0, 2), 6)], ids=["whole", "cut"]
)
def test_a_token_was_accepted_as_often_as_its_probabilities_say(kept, num_followed):
    """5,000 samples at ten positions, false alarm 1e-6 each: rejected tokens follow the residual,
    the next the draft.
    """
    pair = cut(tiny_pair(3, scale=2.0), kept)
    warp = Warp(0.9)
    num_samples = 5_000
    row = record(pair, warp, num_samples=num_samples, max_tokens=2)
    accepted = row["accepted"].reshape(num_samples, -1)
    firsts = {}
    seconds = {}
    for _, start, tokens, _ in branches_of(row):
        firsts.setdefault(start, []).append(tokens[0])
        if len(tokens) > 1:
            seconds.setdefault((start, tokens[0]), []).append(tokens[1])
    for i, token in enumerate(RESPONSE):
        t, d = (
            warp(logits_after(model, PROMPT + RESPONSE[:i])) for model in (pair.target, pair.draft)
        )
        chance = (d[token] / t[token]).clamp_max(1.0)
        assert_follows(
            [accepted[:, i].sum(), (~accepted[:, i]).sum()], torch.stack([chance, 1 - chance])
        )
        if i in firsts:
            residual = (d - t).clamp_min(0)
            assert_follows(np.bincount(firsts[i], minlength=3), residual / residual.sum())
    assert len(seconds) == num_followed
    for (i, token), following in seconds.items():
        distribution = warp(logits_after(pair.draft, [*PROMPT, *RESPONSE[:i], int(token)]))
        assert_follows(np.bincount(following, minlength=3), distribution)


def assert_follows(counts, probs):
    counts = torch.as_tensor(np.array(counts))
    assert (counts[probs == 0] == 0).all()
    if (probs > 0).sum() > 1 and counts.sum() > 300:
        assert chi_square_p_value(counts, probs) > 1e-6


def test_a_branch_ends_with_an_end_token_and_at_the_limit():
    pair = tiny_pair(3, scale=2.0)
    pair.target.generation_config.eos_token_id = 2
    generator = np.random.default_rng(0)
    ends_early = 0
    last_start = {10: 0, 30: 0}
    for _ in range(10):
        response = [*generator.integers(2, size=9).tolist(), 2]
        for limit in (10, 30):
            row = record(pair, Warp(1.0), response, num_samples=20, limit=limit)
            assert row["finished"]
            for _, start, tokens, _ in branches_of(row):
                assert 2 not in tokens[:-1]
                assert len(tokens) == min(5, limit - 1 - start) or tokens[-1] == 2
                ends_early += len(tokens) < min(5, limit - 1 - start)
                last_start[limit] = max(last_start[limit], start)
    assert ends_early > 20
    assert last_start == {10: 8, 30: 9}  # the target alone emits what is at the limit


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("num_positions", [1, 100, 10_000])
def test_responses_that_are_recorded_together_are_recorded_as_alone(
    name, num_positions, monkeypatch
):
    monkeypatch.setattr(branches, "GROWN_BYTES", 0)  # so that they are drafted in parts
    """In float64, of different lengths, one of them without a branch.

    Features are kept in float32.
    """
    pair = family_pair(name)
    generator = np.random.default_rng(6)
    settings = RecordSettings(8, 4)
    lengths = [(3, 9), (11, 1), (6, 13), (1, 2)]
    texts = [
        ResponseToRecord.of(
            generator.integers(29, size=before).tolist(),
            generator.integers(29, size=after).tolist(),
            max(2, after),
            settings,
            number,
            "ab",
        )
        for number, (before, after) in enumerate(lengths)
    ]
    # What the limit ends is not drafted
    texts.append(replace(texts[0], response=texts[0].response[:1], limit=1))
    together = record_responses(pair, texts, Warp(0.8), num_positions)
    assert (
        len(together) == 5 and not len(together[4]["branch_ids"]) and len(together[0]["branch_ids"])
    )
    for text, row in zip(texts, together, strict=True):
        (alone,) = record_responses(pair, [text], Warp(0.8), 100)
        assert row.keys() == alone.keys()
        for column, values in alone.items():
            tolerance = 1e-6 if column in COLUMNS else 0
            np.testing.assert_allclose(row[column], values, rtol=tolerance, atol=tolerance)
