import numpy as np
import pytest
import torch
from feature_drafts import by_loop, features_of, reading_pair

from specheads.heads import batch as batch_module
from specheads.heads.batch import collate, head_features
from specheads.training.heads.mixed_responses import MixedResponses

KINDS = ["input_token", "next_token"]
ALL = frozenset({"hidden", "embedding", "draft_prob", "max_prob", "entropy", "second_prob"})


def coded_rows(count, length, prompt_length=3):
    """Rows in which every number says where it comes from: responses 1000 + i, drafted 2000 + i,
    labels i / length.
    """
    places = np.arange(length)
    row = {
        "prompt_ids": list(range(prompt_length)),
        "response_ids": (1000 + places).tolist(),
        "draft_ids": (2000 + places).tolist(),
        "accept_prob": (places / length).tolist(),
        "more_draft_ids": [],
        "more_accept_prob": [],
    }
    return [row] * count


def mixed(rows, predicts="next_token", response_share=0.15, seed=0, **kwargs):
    return MixedResponses(rows, predicts, response_share, seed, **kwargs)


# --- mixing


@pytest.mark.parametrize(
    ("predicts", "share"),
    [
        *(("input_token", share) for share in (0.0, 0.15, 0.99)),
        *(("next_token", share) for share in (0.0, 0.6, 1.0)),
    ],
)
def test_a_position_keeps_the_targets_token_with_the_response_share(predicts, share):
    data = mixed(coded_rows(200, 100), predicts, share)
    tokens = np.stack([data[0, i]["tokens"] for i in range(200)])
    assert (tokens[:, :3] == [0, 1, 2]).all()  # prompts stay
    kept = tokens[:, 3:] < 2000
    assert (tokens[:, 3:] == np.where(kept, 1000, 2000) + np.arange(100)).all()
    # 20,000 coin flips, with a fixed seed; for a new one, five standard deviations are left by
    # chance once in 1.7e6.
    assert abs(kept.mean() - share) <= 5 * (share * (1 - share) / kept.size) ** 0.5


def test_mixing_is_random_in_epoch_row_and_seed_and_repeatable():
    rows = coded_rows(3, 100)

    def kept(epoch, row, seed=0):
        return tuple(mixed(rows, seed=seed)[epoch, row]["tokens"][3:] < 2000)

    keys = [(epoch, row, seed) for epoch in range(3) for row in range(3) for seed in range(2)]
    drawn = {key: kept(*key) for key in keys}
    assert len(set(drawn.values())) == len(keys)
    assert {key: kept(*key) for key in reversed(keys)} == drawn


def test_an_input_token_head_predicts_only_tokens_that_came_from_the_draft():
    item = mixed(coded_rows(1, 200), "input_token", 0.4)[0, 0]
    from_draft = np.flatnonzero(item["tokens"] >= 2000)
    assert 60 < len(from_draft) < 180
    assert (item["index"] == from_draft).all()
    assert (item["tokens"][item["index"]] == item["drafted"]).all()


def test_a_look_ahead_head_predicts_the_drafted_token_at_every_position():
    item = mixed(coded_rows(1, 200), "next_token", 0.4)[0, 0]
    assert (item["index"] == 3 + np.arange(200)).all()
    assert (item["drafted"] == 2000 + np.arange(200)).all()
    # Where the text goes on with the target's token
    assert 0 < (item["tokens"][item["index"]] != item["drafted"]).sum() < 200


@pytest.mark.parametrize("predicts", KINDS)
def test_every_label_belongs_to_its_token(predicts):
    item = mixed(coded_rows(1, 64), predicts, 0.4)[2, 0]
    places = item["drafted"] - 2000
    assert (item["index"] == 3 + places).all()
    assert item["label"].dtype == np.float32
    np.testing.assert_array_equal(item["label"], places / 64)


# --- batches


def item(tokens, index, drafted, label):
    return {
        "tokens": np.array(tokens),
        "index": np.array(index, dtype=np.int64),
        "drafted": np.array(drafted, dtype=np.int64),
        "label": np.array(label, dtype=np.float32),
    }


def test_items_are_padded_to_the_right_and_their_drafted_tokens_chained():
    batch = collate(
        [
            item([5, 6], [1], [6], [0.5]),
            item([7], [], [], []),
            item([1, 2, 3], [0, 2], [9, 3], [0.0, 1.0]),
        ]
    )
    assert batch.tokens.tolist() == [[5, 6, 0], [7, 0, 0], [1, 2, 3]]
    assert batch.row.tolist() == [0, 2, 2]
    assert batch.index.tolist() == [1, 0, 2]
    assert batch.drafted.tolist() == [6, 9, 3]
    assert batch.label.tolist() == [0.5, 0.0, 1.0]
    assert {value.dtype for value in (batch.tokens, batch.row, batch.index, batch.drafted)} == {
        torch.long
    }
    assert batch.label.dtype == torch.float32


# --- features


@pytest.fixture(scope="module")
def rows(nano64, prompts):
    """Rows of very different length, with drafted tokens that the draft may find unlikely."""
    generator = np.random.default_rng(0)
    lengths = [17, 3, 1, 9]
    return [
        {
            "prompt_ids": prompt,
            "response_ids": generator.integers(nano64.vocab_size, size=length).tolist(),
            "draft_ids": generator.integers(nano64.vocab_size, size=length).tolist(),
            "accept_prob": generator.random(length).tolist(),
            "more_draft_ids": [],
            "more_accept_prob": [],
        }
        for prompt, length in zip([*prompts[:3], [0]], lengths, strict=True)
    ]


def assert_features(actual, expected, rows=slice(None)):
    assert actual.keys() == expected.keys() == ALL
    for name, value in actual.items():
        torch.testing.assert_close(
            value[rows],
            expected[name],
            atol=1e-12,
            rtol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def definition(pair, tokens, index, drafted, predicts):
    """The features of a drafted token from transformers' own output over just the tokens that are
    known by then.
    """
    seen = tokens[: index + 1] if predicts == "input_token" else tokens[:index]
    output = pair.draft(torch.tensor([seen]), output_hidden_states=True, use_cache=False)
    probs = output.logits[0, -1].softmax(dim=-1)
    return {
        "hidden": output.hidden_states[-1][0, -1],
        "embedding": pair.draft.get_input_embeddings().weight[drafted],
        "draft_prob": probs[drafted],
        "max_prob": probs.max(),
        "entropy": -(probs * probs.log()).sum(),
        "second_prob": probs.sort().values[-2],
    }


@pytest.mark.parametrize("predicts", KINDS)
def test_features_are_the_drafts_output_over_the_tokens_that_are_known_when_the_head_predicts(
    nano64, rows, predicts
):
    data = mixed(rows, predicts, 0.3)
    batch = collate([data[0, i] for i in range(4)])
    actual = head_features(nano64, batch, predicts, ALL)
    assert len(batch.row) >= 15
    for n in range(len(batch.row)):
        row = int(batch.row[n])
        index = int(batch.index[n])
        expected = definition(
            nano64, batch.tokens[row].tolist(), index, int(batch.drafted[n]), predicts
        )
        assert_features(actual, expected, n)


@pytest.fixture(scope="module")
def reading(nano64):
    return reading_pair(nano64, layers=(1, 3, 4))


def with_depths(rows):
    """Return rows with rounds of up to three tokens."""
    generator = np.random.default_rng(1)
    found = []
    for row in rows:
        lengths = generator.integers(1, 4, size=len(row["response_ids"]))
        depths = np.concatenate([np.arange(length) for length in lengths])
        found.append(row | {"draft_depth": depths[: len(lengths)].tolist()})
    return found


@pytest.mark.parametrize(
    ("predicts", "share"), [("input_token", 0.3), ("next_token", 1.0), ("next_token", 0.5)]
)
def test_features_of_a_draft_that_reads_its_target_are_those_of_its_steps(
    reading, rows, predicts, share
):
    """The first step of a round reads the response, later ones its drafted tokens."""
    rows = with_depths(rows)[:3]  # before the first token of a text without prompt is no state
    data = mixed(rows, predicts, share)
    batch = collate([data[0, number] for number in range(3)])
    found = head_features(reading, batch, predicts, ALL | {"depth"})
    after = int(predicts == "input_token")
    number = 0
    for place, row in enumerate(rows):
        text = torch.tensor([*row["prompt_ids"], *row["response_ids"]])
        assert batch.committed[place, : len(text)].tolist() == text.tolist()
        tokens = batch.tokens[place, : len(text)]
        features = features_of(reading.target, text, reading.draft_lm.reads_layers)
        states = by_loop(reading.draft, text, features, 4, tokens)
        for index in batch.index[batch.row == place].tolist():
            depth = row["draft_depth"][index - len(row["prompt_ids"])]
            hidden = states[depth + after, index - 1 + after]
            torch.testing.assert_close(found["hidden"][number], hidden, atol=1e-10, rtol=0)
            probs = reading.draft_lm.logits(hidden).softmax(-1)
            drafted = probs[batch.drafted[number]]
            torch.testing.assert_close(found["draft_prob"][number], drafted, atol=1e-10, rtol=0)
            assert found["depth"][number] == depth + after
            number += 1
    assert number == len(batch.index) >= 15
    assert batch.depth.unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("predicts", KINDS)
def test_features_of_a_padded_batch_equal_those_of_each_row_alone(nano64, rows, predicts):
    items = [mixed(rows, predicts, 0.3)[0, i] for i in range(4)]
    together = head_features(nano64, collate(items), predicts, ALL)
    alone = [head_features(nano64, collate([item]), predicts, ALL) for item in items]
    assert_features(together, {name: torch.cat([part[name] for part in alone]) for name in ALL})


@pytest.mark.parametrize("elements", [1, 2048 * 7])
def test_features_in_slices_equal_those_in_one(nano64, rows, monkeypatch, elements):
    batch = collate([mixed(rows)[0, i] for i in range(4)])
    whole = head_features(nano64, batch, "next_token", ALL)
    monkeypatch.setattr(batch_module, "SLICE_ELEMENTS", elements)
    assert_features(head_features(nano64, batch, "next_token", ALL), whole)


@pytest.mark.parametrize("needs", [{"hidden"}, {"embedding", "token"}, {"hidden", "entropy"}])
def test_only_the_features_that_are_needed_are_computed(nano64, rows, needs):
    batch = collate([mixed(rows)[0, i] for i in range(4)])
    everything = head_features(nano64, batch, "next_token", ALL) | {"token": batch.drafted}
    actual = head_features(nano64, batch, "next_token", frozenset(needs))
    assert needs == actual.keys()
    for name in needs:
        torch.testing.assert_close(actual[name], everything[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("predicts", KINDS)
def test_a_batch_without_drafted_tokens_has_features_of_no_tokens(nano64, rows, predicts):
    size = nano64.draft_lm.hidden_size
    batch = collate([item(rows[0]["prompt_ids"], [], [], [])])
    actual = head_features(nano64, batch, predicts, ALL)
    assert {name: tuple(value.shape) for name, value in actual.items()} == {
        "hidden": (0, size),
        "embedding": (0, size),
        "draft_prob": (0,),
        "max_prob": (0,),
        "entropy": (0,),
        "second_prob": (0,),
    }
