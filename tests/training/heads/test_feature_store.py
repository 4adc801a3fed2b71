"""Stored features are those that the draft computes, whatever epoch, order and process asks for
them.
"""

import logging

import numpy as np
import pytest
import torch
from feature_drafts import reading_pair

from specheads.heads.batch import collate, head_features
from specheads.training.heads.mixed_responses import FeatureStore, MixedResponses

NEEDS = frozenset({"hidden", "embedding", "draft_prob", "max_prob", "entropy", "second_prob"})
NEEDS_OF = {
    "next_token": NEEDS,
    "input_token": frozenset({"hidden", "max_prob", "entropy", "second_prob"}),
}
NUM_EPOCHS = 3
NUM_MIXES = 2


@pytest.fixture(scope="module")
def rows(nano64, prompts):
    """Rows of very different length with three samples."""
    generator = np.random.default_rng(0)

    def tokens(length):
        return generator.integers(nano64.vocab_size, size=length).tolist()

    return [
        {
            "prompt_ids": prompts[number % len(prompts)][:9],
            "response_ids": tokens(length),
            "draft_ids": tokens(length),
            "accept_prob": generator.random(length).tolist(),
            "more_draft_ids": [tokens(length), tokens(length)],
            "more_accept_prob": [generator.random(length).tolist() for _ in range(2)],
        }
        for number, length in enumerate([17, 3, 1, 9, 30, 2, 5])
    ]


def mixed(rows, predicts="next_token", share=None, num_mixes=1):
    return {
        "train": MixedResponses(rows, predicts, share, 0, num_mixes),
        "dev": MixedResponses(rows[:3], predicts, share, 0, 1),
    }


def stored(folder, nano64, splits, budget=1.0):
    (predicts,) = {data.predicts for data in splits.values()}
    FeatureStore(folder, nano64, splits, NEEDS_OF[predicts]).store(budget)
    return splits


def assert_equals_online(nano64, dataset, keys):
    """Compare in float64 with what the draft says of the same items."""
    items = [dataset[key] for key in keys]
    batch = collate(items)
    needs = NEEDS_OF[dataset.predicts] - {"embedding"}
    expected = head_features(nano64, batch, dataset.predicts, needs)
    assert len(batch.drafted) > 0 and batch.features.keys() >= expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            batch.features[name],
            value,
            atol=1e-10,
            rtol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("shard_bytes", [1, 20_000, 2**28])
def test_stored_features_equal_those_of_the_draft_in_every_epoch(
    nano64, rows, tmp_path, monkeypatch, shard_bytes
):
    monkeypatch.setattr("specheads.storage.row_store.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr("specheads.training.loaders.BATCH_TOKENS", 40)
    data = stored(tmp_path, nano64, mixed(rows))
    for epoch in range(NUM_EPOCHS):
        assert_equals_online(
            nano64, data["train"], [(epoch, number) for number in (4, 0, 6, 2, 1, 5, 3)]
        )
    assert_equals_online(nano64, data["dev"], [(0, number) for number in range(3)])
    files = list(tmp_path.glob("features/*/*.safetensors"))
    assert len(files) == {1: 7 + 3, 2**28: 2}.get(shard_bytes, len(files))
    assert len(files) > 2 or shard_bytes == 2**28


@pytest.mark.parametrize(("predicts", "share"), [("input_token", 0.5), ("next_token", 0.5)])
def test_each_mix_has_its_features_in_the_epochs_that_take_it(
    nano64, rows, tmp_path, caplog, predicts, share
):
    caplog.set_level(logging.INFO)
    data = stored(tmp_path, nano64, mixed(rows, predicts, share, NUM_MIXES))
    for epoch in range(2 * NUM_MIXES):
        assert_equals_online(nano64, data["train"], [(epoch, number) for number in range(7)])
    assert_equals_online(nano64, data["dev"], [(0, number) for number in range(3)])
    caplog.clear()
    stored(tmp_path, nano64, mixed(rows, predicts, share, NUM_MIXES + 1))
    assert "1 of 4 shards to do" in caplog.text  # those of fewer mixes are there


@pytest.mark.parametrize(("predicts", "share"), [("input_token", 0.5), ("next_token", 1.0)])
def test_features_of_a_draft_that_reads_its_target_are_stored(
    nano64, rows, tmp_path, predicts, share
):
    pair = reading_pair(nano64, layers=(1, 3, 4))
    rows = [row | {"draft_depth": [*range(3)] * 10} for row in rows]
    for row in rows:
        row["draft_depth"] = row["draft_depth"][: len(row["response_ids"])]
    data = stored(tmp_path, pair, mixed(rows, predicts, share, NUM_MIXES))
    for epoch in range(2 * NUM_MIXES):
        assert_equals_online(pair, data["train"], [(epoch, number) for number in range(7)])
    assert_equals_online(pair, data["dev"], [(0, number) for number in range(3)])


def test_a_complete_store_is_not_made_again_and_a_damaged_shard_alone_is(
    nano64, rows, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("specheads.storage.row_store.SHARD_BYTES", 1)
    stored(tmp_path, nano64, mixed(rows))
    assert "10 of 10 shards to do" in caplog.text
    caplog.clear()
    stored(tmp_path, nano64, mixed(rows))
    assert "features reused from" in caplog.text
    path = next(tmp_path.glob("features/*/train-000-00000004.safetensors"))
    content = path.read_bytes()
    path.write_bytes(content[:-8] + bytes(8))
    stored(tmp_path, nano64, mixed(rows))
    assert path.read_bytes() == content and "1 of 10 shards to do" in caplog.text


def test_other_features_texts_or_data_have_another_store(nano64, rows, tmp_path):
    def folder(splits, needs=NEEDS, where=tmp_path):
        return FeatureStore(where, nano64, splits, needs).folder

    folders = [
        folder(mixed(rows)),
        folder(mixed(rows), NEEDS - {"second_prob"}),
        folder(mixed(rows[:4])),
        folder(mixed(rows, share=0.5)),
        folder(mixed(rows, "input_token", share=0.5)),
        folder(mixed(rows), where=tmp_path / "b"),
    ]
    assert len(set(folders)) == 6 and folder(mixed(rows)) == folders[0]


@pytest.mark.parametrize(("budget", "fits"), [(1.0, True), (1e-9, False), (0, False)])
def test_features_are_stored_if_they_fit(nano64, rows, tmp_path, budget, fits):
    data = stored(tmp_path, nano64, mixed(rows), budget)["train"]
    assert (data.features is not None) == fits
