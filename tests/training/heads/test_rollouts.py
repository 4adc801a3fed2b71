"""What heads learn from rollouts: which tokens, from which states, with which labels and weights."""

import math

import lightning as L
import numpy as np
import pytest
import torch
from datasets import Dataset

from specheads.errors import UserError
from specheads.heads.batch import collate, head_features
from specheads.heads.head import HeadConfig
from specheads.heads.metrics import prediction_metrics
from specheads.training.heads import feature_store as store_module
from specheads.training.heads.bank import HeadBank, HeadSpec
from specheads.training.heads.feature_store import FeatureStore
from specheads.training.heads.head_loss import weighted_bce
from specheads.training.heads.head_module import HeadModule
from specheads.training.heads.head_shape import LABELS
from specheads.training.heads.mixed_responses import MixedResponses
from specheads.training.heads.settings import HeadTraining
from specheads.training.loaders import ResumableData
from specheads.training.optimizer import Optimizer

KINDS = ["input_token", "next_token"]
NEEDS = {
    "input_token": frozenset({"hidden", "entropy"}),
    "next_token": frozenset({"hidden", "draft_prob", "max_prob", "entropy"}),
}
NUM_EPOCHS = 2


@pytest.fixture(scope="module")
def rows(nano64, prompts):
    """Rows of very different length with two draws and 0 to 3 rollouts of 1 to 4 tokens."""
    generator = np.random.default_rng(0)

    def tokens(length):
        return generator.integers(2, nano64.vocab_size, size=length).tolist()

    made = []
    for number, length in enumerate([17, 3, 1, 9, 30, 2, 5]):
        sizes = generator.integers(1, 5, size=number % 4).tolist()
        made.append(
            {
                "prompt_ids": prompts[number][:9],
                "response_ids": tokens(length),
                "draft_ids": tokens(length),
                "accept_prob": generator.random(length).tolist(),
                "overlap": generator.random(length).tolist(),
                "more_draft_ids": [tokens(length)],
                "more_accept_prob": [generator.random(length).tolist()],
                "rollout_start": generator.integers(0, length, size=len(sizes)).tolist(),
                "rollout_ids": [tokens(size) for size in sizes],
                "rollout_accept_prob": [generator.random(size).tolist() for size in sizes],
            }
        )
    return made


def mixed(rows, predicts="next_token", share=None, labels=LABELS):
    return MixedResponses(rows, predicts, share, 0, labels)


def exactly(*expected):
    """Values as float32, NaN equal to itself."""
    return pytest.approx(np.array(expected, dtype=np.float32), nan_ok=True)


# --- texts and labels


@pytest.mark.parametrize("predicts", KINDS)
@pytest.mark.parametrize("epoch", [0, 1])
def test_an_item_is_the_response_and_then_its_rollouts(rows, predicts, epoch):
    for number, row in enumerate(rows):
        item, plain = (mixed(rows, predicts, 0.4, labels)[epoch, number] for labels in (LABELS, LABELS[:2]))
        count = len(plain["index"])
        assert (item["tokens"] == plain["tokens"]).all() and plain["rollouts"] == []
        for name in ("text", "index", "drafted"):
            assert (item[name][:count] == plain[name]).all()
        for name in ("sampled", "overlap"):
            assert (item["labels"][name][:count] == plain["labels"][name]).all()
            assert np.isnan(item["labels"][name][count:]).all()
        # A draft of one token is exact in its context.
        assert (item["labels"]["rollout"][:count] == plain["labels"]["sampled"]).all()
        assert (item["alive"][:count] == 1).all() and (plain["alive"] == 1).all()
        assert [text.tolist() for text in item["rollouts"]] == [
            [*row["prompt_ids"], *row["response_ids"][:start], *ids]
            for start, ids in zip(row["rollout_start"], row["rollout_ids"], strict=True)
        ]
        for place, ids in enumerate(row["rollout_ids"]):
            chosen = item["text"] == place + 1
            text, length = item["rollouts"][place], len(ids)
            assert item["index"][chosen].tolist() == list(range(len(text) - length, len(text)))
            assert text[item["index"][chosen]].tolist() == item["drafted"][chosen].tolist() == ids
            assert item["labels"]["rollout"][chosen] == exactly(*row["rollout_accept_prob"][place])


def test_the_survival_of_a_round_is_the_product_of_earlier_probabilities():
    row = {
        **{name: [1, 2] for name in ("prompt_ids", "response_ids", "draft_ids")},
        **{name: [0.3, 0.4] for name in ("accept_prob", "overlap")},
        "more_draft_ids": [],
        "more_accept_prob": [],
        "rollout_start": [1],
        "rollout_ids": [[5, 6, 7, 8]],
        "rollout_accept_prob": [[0.5, 1.0, 0.2, 0.9]],
    }
    assert mixed([row])[0, 0]["alive"] == exactly(1, 1, 1, 0.5, 0.5, 0.1)


def test_heads_of_responses_read_no_rollouts(rows):
    bare = [{name: value for name, value in row.items() if not name.startswith("rollout")} for row in rows]
    assert not mixed(bare, labels=("sampled", "overlap")).rolls
    assert len(mixed(bare, labels=["sampled"])[0, 4]["index"]) == 30


def test_rows_on_disk_equal_rows_in_memory(rows):
    disk, memory = mixed(Dataset.from_list(rows)), mixed(rows)
    assert (
        disk.lengths().tolist()
        == memory.lengths().tolist()
        == [len(row["response_ids"]) + sum(map(len, row["rollout_ids"])) for row in rows]
    )
    for number in range(len(rows)):
        first, other = (collate([data[1, number]]) for data in (disk, memory))
        assert torch.equal(first.tokens, other.tokens) and torch.equal(first.row, other.row)
        torch.testing.assert_close(first.alive, other.alive)  # a product of numbers that the disk has rounded
        for name in LABELS:
            torch.testing.assert_close(first.labels[name], other.labels[name], equal_nan=True, rtol=0, atol=0)


# --- features, in a batch and stored


@pytest.mark.parametrize("predicts", KINDS)
def test_features_are_those_of_the_draft_after_the_tokens_of_the_rollout(nano64, rows, predicts):
    data = mixed(rows, predicts)
    batch = collate([data[0, number] for number in range(len(rows))])
    hidden = head_features(nano64.draft_lm, batch, predicts, NEEDS[predicts])["hidden"]
    row_of_text = [number for number, row in enumerate(rows) for _ in range(1 + len(row["rollout_ids"]))]
    assert len(batch.tokens) == len(row_of_text) and batch.row.max() == len(row_of_text) - 1
    inside = batch.labels["sampled"].isnan()
    assert inside.sum() == sum(len(ids) for row in rows for ids in row["rollout_ids"])
    assert torch.equal(inside, ~batch.of_response)
    for n in inside.nonzero().flatten().tolist():
        text = batch.tokens[batch.row[n]].tolist()
        seen = text[: int(batch.index[n]) + (predicts == "input_token")]
        assert seen[:9] == rows[row_of_text[int(batch.row[n])]]["prompt_ids"][: len(seen)]
        expected = nano64.draft(torch.tensor([seen]), output_hidden_states=True, use_cache=False).hidden_states[-1][0, -1]
        torch.testing.assert_close(hidden[n], expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("predicts", KINDS)
@pytest.mark.parametrize("shard_bytes", [1, 2**28])
def test_stored_features_of_rollouts_equal_those_of_the_draft_in_every_epoch(
    nano64, rows, tmp_path, monkeypatch, predicts, shard_bytes
):
    monkeypatch.setattr("specheads.storage.tensor_shards.SHARD_BYTES", shard_bytes)
    monkeypatch.setattr(store_module, "BATCH_TOKENS", 60)
    splits = {"train": mixed(rows, predicts), "dev": mixed(rows[:3], predicts)}
    data = FeatureStore(tmp_path, nano64.draft_lm, splits, NEEDS[predicts], NUM_EPOCHS).splits_by("cached", 1.0)
    for epoch in range(NUM_EPOCHS):
        batch = collate([data["train"][epoch, number] for number in (4, 0, 6, 2, 1, 5, 3)])
        expected = head_features(nano64.draft_lm, batch, predicts, NEEDS[predicts])
        assert batch.features.keys() >= expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(batch.features[name], value, atol=1e-10, rtol=0)
    store, plain = (
        FeatureStore(tmp_path, nano64.draft_lm, {"train": mixed(rows, predicts, None, labels)}, NEEDS[predicts], 1)
        for labels in (LABELS, LABELS[:1])
    )
    assert store.folder != plain.folder and store.bytes() > plain.bytes()


def test_the_store_counts_the_texts_of_rollouts_in_the_size_of_its_batches(nano64, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "BATCH_TOKENS", 100)
    sizes, real = [], nano64.draft_lm.hidden_states
    monkeypatch.setattr(nano64.draft_lm, "hidden_states", lambda tokens, **more: (sizes.append(tokens), real(tokens, **more))[1])
    FeatureStore(tmp_path, nano64.draft_lm, {"train": mixed(rows * 2)}, NEEDS["next_token"], 1).make()
    largest = max(collate([mixed(rows)[0, number]]).tokens.numel() for number in range(len(rows)))
    assert len(sizes) < 14 and max(tokens.numel() for tokens in sizes) <= max(100, largest)


# --- the loss


def test_a_position_without_a_label_has_no_weight():
    logits = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([0.3, math.nan, 1.0, math.nan, 0.0, 0.5], dtype=torch.float64)
    total, weight = weighted_bce(logits, labels, 1.0, 6.0)
    kept = ~labels.isnan()
    expected = weighted_bce(logits[kept], labels[kept], 1.0, 6.0)
    torch.testing.assert_close((total, weight), expected)
    total.backward()
    assert (logits.grad[~kept] == 0).all() and logits.grad.isfinite().all()
    assert [value.item() for value in weighted_bce(logits, torch.full((6,), math.nan), 1.0, 6.0)] == [0, 0]


def test_survival_weights_by_hand():
    labels, alive = torch.tensor([1.0, 0.25]), torch.tensor([1.0, 0.5])
    total, weight = weighted_bce(torch.zeros(2), labels, 2.0, 4.0, alive)
    # 2 of the first, 0.5 (2 * 0.25 + 4 * 0.75) of the second; a logit of 0 costs log 2
    assert weight.item() == pytest.approx(2 + 0.5 * 3.5) and total.item() == pytest.approx(3.75 * math.log(2))


def test_only_heads_that_ask_for_it_are_weighted_by_survival():
    specs = [
        HeadSpec(f"{label}-{on}", HeadConfig(4, 0, label=label), survival_weighted=on) for label in LABELS for on in (False, True)
    ]
    generator = torch.Generator().manual_seed(0)
    labels = {name: torch.rand(9, generator=generator) for name in LABELS}
    alive = torch.rand(9, generator=generator)
    logits = torch.randn(len(specs), 9, generator=generator)
    sums, weights = HeadBank(specs, 0).losses(logits, labels, alive)
    for number, spec in enumerate(specs):
        label = spec.config.label
        counted = alive if spec.survival_weighted else 1.0
        torch.testing.assert_close((sums[number], weights[number]), weighted_bce(logits[number], labels[label], alive=counted))


def test_an_unknown_weighting_is_refused():
    with pytest.raises(UserError, match=r"loss\.survival_weighted=often must be true or false"):
        HeadTraining(loss={"survival_weighted": "often"})


# --- training


def trained(nano, rows, tmp_path, predicts, specs, labels):
    splits = {
        name: MixedResponses(part, predicts, 0.4, 0, labels) for name, part in {"train": rows, "dev": rows, "test": rows}.items()
    }
    module, data = (
        HeadModule(HeadBank(specs, 0), nano.draft_lm, Optimizer(lr=1e-2)),
        ResumableData(splits, 4, 0, 0, collate),
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    fit = L.Trainer(max_epochs=3, accelerator="cpu", num_sanity_val_steps=0, default_root_dir=tmp_path, **quiet)
    fit.fit(module, data)
    metrics = {name: value.item() for name, value in fit.callback_metrics.items() if name.startswith("dev/")}
    fit.test(module, data, verbose=False)
    return module, data, metrics


@pytest.mark.parametrize("predicts", KINDS)
def test_rollouts_change_neither_heads_of_responses_nor_metrics(nano, rows, tmp_path, predicts):
    def spec(label, survival_weighted=False):
        return HeadSpec(label, HeadConfig(nano.draft_lm.hidden_size, 1, predicts, label=label), 1.0, 1.0, survival_weighted)

    together, data, metrics = trained(
        nano, rows, tmp_path, predicts, [spec("sampled"), spec("rollout", True)], ("sampled", "rollout")
    )
    alone, _, expected = trained(nano, rows, tmp_path, predicts, [spec("sampled")], ("sampled",))
    states = [
        {name: value.clone() for name, value in first.bank.heads["sampled"].state_dict().items()} for first in (together, alone)
    ]
    for name, value in states[1].items():
        torch.testing.assert_close(states[0][name], value, atol=1e-5, rtol=0)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-4)
    assert together.test_results["entropy"] == pytest.approx(alone.test_results["entropy"], abs=1e-6)
    batch = collate([data.splits["dev"][0, number] for number in range(len(rows))])
    with torch.no_grad():
        logits = together.bank(together.features(batch))
    kept = batch.of_response
    chosen = prediction_metrics(logits[1, kept], batch.label[kept])
    assert together.test_results["rollout"] == pytest.approx(chosen, rel=1e-4)
    sums, weights = together.bank.losses(logits, batch.labels, batch.alive)
    assert metrics["dev/rollout/loss"] == pytest.approx((sums / weights)[1].item(), rel=1e-4)
    moved = together.bank.heads["rollout"].readout.weight - together.bank.heads["sampled"].readout.weight
    assert moved.abs().max() > 1e-3  # what the other learnt did differ
