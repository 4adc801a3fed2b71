"""Labels of drafts that read their target, against a loop over rounds, and against decoding."""

import itertools
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from fakes import tiny_pair
from feature_drafts import by_loop, features_of, reading_pair
from statistics_helper import chi_square_p_value

from specheads import SpeculativeDecoder, stopping
from specheads.data_gen import draft_rounds, shard_rows
from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import label_responses
from specheads.pair.sampling import Warp, accept_prob, tokens_at
from specheads.prompts.prompt import Prompt
from specheads.storage.shards import MANIFEST

SIZE = 6
LENGTHS = [
    (3, 9),
    (11, 1),
    (1, 14),
    (6, 30),
    (2, 2),
    (9, 11),
]  # of prompt and response, in no order
WARPS = [Warp(0), Warp(1.0), Warp(0.7, top_k=3)]
COLUMNS = ["draft_ids", "accept_prob", "more_draft_ids", "more_accept_prob", "draft_depth"]


def random_texts(pair, warp):
    """Return prompts and responses; of a greedy target some tokens of the responses are its own."""
    generator = np.random.default_rng(0)
    prompts = []
    responses = []
    for length, most in LENGTHS:
        prompt = generator.integers(SIZE, size=length).tolist()
        text = torch.tensor([prompt])
        for _ in range(most):
            probs = warp(pair.target_lm.logits(pair.target_lm.hidden_states(text)))[:, -1]
            token = warp.draw(probs, torch.from_numpy(generator.random(1)))
            text = torch.cat([text, token[None]], dim=1)
        prompts.append(prompt)
        responses.append(text[0, length:].tolist())
    return prompts, responses


def uniform(count, length, samples=2, seed=1):
    """Return numbers of `samples` and of rounds."""
    return np.random.default_rng(seed).random((count, samples + 1, length))


def by_rounds(pair, prompt, response, uniforms, warp):
    """Return labels by drafting in rounds that follow each other, one position after another."""
    tokens = torch.tensor([*prompt, *response])
    features = features_of(pair.target, tokens, pair.draft_lm.reads_layers)
    states = by_loop(pair.draft, tokens, features, draft_rounds.MAX_TOKENS)
    of_target = warp(pair.target_lm.logits(pair.target_lm.hidden_states(tokens[None])[0]))
    *of_samples, of_rounds = torch.from_numpy(uniforms[:, : len(response)])
    depths = []
    rows = []
    depth = 0
    for number, token in enumerate(response):
        place = len(prompt) - 1 + number
        target_probs = of_target[place]
        draft_probs = warp(pair.draft_lm.logits(states[depth, place]))
        numbers = torch.stack(of_samples)[:, number]
        drafted = tokens_at(draft_probs[None], numbers[None])[0]
        rows.append((drafted, accept_prob(target_probs[drafted], draft_probs[drafted])))
        depths.append(depth)
        chance = (draft_probs[token] / target_probs[token]).clamp_max(1)
        was_drafted = of_rounds[number] < chance and place > 0
        depth = depth + 1 if was_drafted and depth + 1 < draft_rounds.MAX_TOKENS else 0
    ids, probs = (torch.stack(column, dim=1).tolist() for column in zip(*rows, strict=True))
    return dict(zip(COLUMNS, (ids[0], probs[0], ids[1:], probs[1:], depths), strict=True))


def assert_same(found, expected):
    assert list(found) == COLUMNS
    for name, value in expected.items():
        if name.endswith("accept_prob"):
            np.testing.assert_allclose(found[name], value, rtol=1e-10, atol=1e-12)
        else:
            assert found[name] == value, name


@pytest.mark.parametrize("choices", [{}, {"norm_output": True, "kept": torch.tensor([0, 2, 3, 5])}])
@pytest.mark.parametrize("warp", WARPS, ids=str)
def test_labels_are_those_of_a_loop_over_rounds(warp, choices):
    pair = reading_pair(tiny_pair(SIZE, scale=1.5), gain=1.0, **choices)
    prompts, responses = random_texts(pair, warp)
    uniforms = uniform(len(prompts), 30)
    found = label_responses(pair, prompts, responses, uniforms, warp)
    for labels, *text in zip(found, prompts, responses, uniforms, strict=True):
        assert_same(labels, by_rounds(pair, *text, warp))
    depths = [depth for labels in found for depth in labels["draft_depth"]]
    assert {0, 1, 2} < set(depths) or warp.greedy


def test_a_round_has_at_most_so_many_tokens():
    """With a draft that is as good as its target: both are uniform."""
    pair = reading_pair(tiny_pair(SIZE, scale=0.0))
    pair.draft.lm_head.weight.zero_()
    most = draft_rounds.MAX_TOKENS
    response = [1, 2, 3] * most
    found = label_responses(
        pair, [[4], [4, 4]], [response] * 2, uniform(2, len(response)), Warp(1.0)
    )
    depths = [number % most for number in range(len(response))]
    assert found[1]["draft_depth"] == depths
    assert found[0]["draft_depth"] == [0, *depths[:-1]]  # no state predicts its first token
    assert set(found[1]["accept_prob"]) == {1.0}


@pytest.mark.parametrize(("tokens", "elements"), [(1, SIZE), (40, 7 * SIZE), (40, 1)])
def test_small_batches_and_slices_have_the_same_labels(monkeypatch, tokens, elements):
    pair = reading_pair(tiny_pair(SIZE, scale=1.5), gain=1.0)
    warp = Warp(1.0)
    prompts, responses = random_texts(pair, warp)
    uniforms = uniform(len(prompts), 30)
    together = label_responses(pair, prompts, responses, uniforms, warp)
    monkeypatch.setattr(shard_rows, "SLICE_ELEMENTS", elements)
    monkeypatch.setattr(shard_rows, "BATCH_TOKENS", tokens)
    found = label_responses(pair, prompts, responses, uniforms, warp)
    for labels, expected in zip(found, together, strict=True):
        assert_same(labels, expected)


def test_depths_are_distributed_as_in_decoding():
    """Those of the third token, of 500 responses. A false alarm has probability 1e-6."""
    pair = reading_pair(tiny_pair(4, scale=1.0), gain=1.0)
    warp = Warp(1.0)
    rule = stopping.FixedLength(5)
    decoder = SpeculativeDecoder(pair, stopping=rule, warp=warp, engine="eager")
    outs = decoder.generate_batch(
        [[0, 1]] * 500, max_batch=50, max_new_tokens=6, seeds=range(500), stop_tokens=[]
    )
    counts = torch.zeros(3, dtype=torch.float64)
    for out in outs:
        depths = [depth for each in out.rounds for depth in range(len(each.tokens))]
        counts[depths[2]] += 1
    texts = [list(text) for text in itertools.product(range(4), repeat=3)]
    tokens = torch.tensor([[0, 1, *text] for text in texts])
    probs = warp(pair.target_lm.logits(pair.target_lm.hidden_states(tokens)))[:, 1:-1]
    probs = probs.gather(2, torch.tensor(texts)[:, :, None]).prod(dim=1)[:, 0]
    expected = torch.zeros(3, dtype=torch.float64)
    for numbers in uniform(100, 3 * len(texts)).reshape(100, len(texts), -1, 3):
        labels = label_responses(pair, [[0, 1]] * len(texts), texts, numbers, warp)
        expected.index_add_(0, torch.tensor([each["draft_depth"][2] for each in labels]), probs)
    assert counts.min() > 20
    assert chi_square_p_value(counts, expected / 100) > 1e-6


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setenv("SPECHEADS_ENGINE", "eager")
    pair = tiny_pair(8, scale=2.0)
    pair.target.generation_config.eos_token_id = 0
    return reading_pair(pair)


def data(pair, folder, prompts, **more):
    settings = DataGeneration(
        warp=Warp(1.0), max_new_tokens=9, max_prompt_tokens=8, rows_per_shard=2, **more
    )
    folder = generate_data(pair, prompts, settings, folder)
    rows = []
    for path in sorted(folder.glob("*.parquet")):
        rows += pq.read_table(path).to_pylist()
    return folder, rows


def letters(count):
    prompts = []
    for number in range(count):
        text = format(number, "05b").translate(str.maketrans("01", "ab"))
        prompts.append(Prompt(format(number, "016x"), ("train", "dev", "test")[number % 3], text))
    return prompts


def test_data_sets_have_depths_and_are_resumed_to_the_same_rows(pair, tmp_path):
    folder, rows = data(pair, tmp_path, letters(12))
    for row in rows:
        assert len(row["draft_depth"]) == len(row["draft_ids"]) == len(row["response_ids"])
    assert max(depth for row in rows for depth in row["draft_depth"]) > 1
    for path in (folder / MANIFEST, *folder.glob("train-*")):
        path.unlink()
    assert data(pair, tmp_path, letters(12)) == (folder, rows)


def test_other_drafts_on_the_same_responses(pair, tmp_path):
    """Labels of a draft that reads tokens alone are what they were, and have no depths."""
    alone = tiny_pair(8, scale=2.0)
    alone.target.generation_config.eos_token_id = 0
    alone = replace(alone, target=pair.target)
    _, expected = data(alone, tmp_path / "alone", letters(6))
    data(pair, tmp_path / "both", letters(6))
    _, rows = data(alone, tmp_path / "both", letters(6))
    assert rows == expected
    assert {len(row["draft_depth"]) for row in rows} == {0}
