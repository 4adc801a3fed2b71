"""A cache for another draft takes over the target's responses, and is what it would have been
without.
"""

import re
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from fakes import tiny_pair

from specheads.data_gen.run import generate_data
from specheads.data_gen.settings import DataGeneration
from specheads.decoding.responses import Responder
from specheads.errors import UserError
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt
from specheads.prompts.sources import NanoSource

SIZES = {
    "max_new_tokens": 6,
    "max_prompt_tokens": 8,
    "batch_size": 2,
    "rows_per_shard": 3,
    "responses_per_prompt": 2,
}
SETTINGS = DataGeneration(warp=Warp(1.0, top_k=5), **SIZES)


class Letters:
    def load(self, chats):
        for number, text in enumerate(("abcd", "bcde", "hgfe", "aabb", "ccdd", "gg", "fgh")):
            yield Prompt(
                f"{number:x}", "train" if number < 5 else "dev" if number < 6 else "test", text
            )


@pytest.fixture(scope="module")
def pairs():
    """Two pairs of the same target."""
    first = tiny_pair(8, scale=2.0)
    first.target.generation_config.eos_token_id = 0
    return first, replace(
        first, draft=tiny_pair(8, scale=1.0).draft, draft_id="other", draft_revision="2"
    )


def make(pair, root, settings=SETTINGS):
    return generate_data(pair, Letters(), settings, root)


@pytest.fixture
def generated(monkeypatch):
    """How many responses were generated."""
    counts = []
    original = Responder.respond
    monkeypatch.setattr(
        Responder,
        "respond",
        lambda self, prompts, *rest, **how: (
            counts.append(len(prompts)) or original(self, prompts, *rest, **how)
        ),
    )
    return counts


def content(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_another_draft_gets_the_same_rows_without_generating(pairs, tmp_path, generated):
    make(pairs[0], tmp_path / "shared")
    alone = make(pairs[1], tmp_path / "alone")
    generated.clear()
    shared = make(pairs[1], tmp_path / "shared")
    assert not generated and content(shared) == content(alone)


@pytest.mark.parametrize("changed", [{"seed": 1}, {"max_new_tokens": 5}])
def test_other_settings_share_nothing(pairs, tmp_path, generated, changed):
    make(pairs[0], tmp_path)
    generated.clear()
    make(pairs[1], tmp_path, SETTINGS.but(**changed))
    assert sum(generated) == 12


def test_shards_of_few_rows_are_answered_together_but_for_greedy_ones(pairs, tmp_path, generated):
    few = SETTINGS.but(rows_per_shard=1, responses_per_prompt=3, batch_size=4)
    folder = only_responses(pairs[0], tmp_path, few)
    assert len(content(folder)) == 3 * 5 + 2 and max(generated) == 4 and sum(generated) == 17
    assert not list(folder.glob(".*.jsonl"))
    alone = only_responses(pairs[0], tmp_path / "alone", few.but(rows_per_shard=9))
    columns = ["prompt_id", "sample", "response_ids"]
    made, others = (
        [
            row
            for name in sorted(content(each))
            for row in pq.read_table(each / name).select(columns).to_pylist()
        ]
        for each in (folder, alone)
    )
    assert made == others
    generated.clear()
    only_responses(pairs[0], tmp_path, few.but(warp=Warp(0)))
    assert generated == [4, 1, 4, 4, 2, 2]  # first responses are greedy, further ones sampled


def test_a_cache_of_all_splits_is_used_for_some_splits(pairs, tmp_path, generated):
    whole = make(pairs[0], tmp_path)
    generated.clear()
    some = generate_data(pairs[0], Letters(), SETTINGS, tmp_path, ("dev", "test"))
    assert some == whole and not generated
    alone = generate_data(pairs[0], Letters(), SETTINGS, tmp_path / "alone", ("dev", "test"))
    assert (
        sorted(content(alone)) == ["dev-00000.parquet", "test-00000.parquet"]
        and sum(generated) == 2
    )
    assert all(content(alone)[name] == content(whole)[name] for name in content(alone))


def only_responses(pair, root, settings=SETTINGS):
    return generate_data(pair, Letters(), settings, root, labelled=False)


def test_responses_alone_are_made_once_for_all_drafts(pairs, tmp_path, generated):
    folder = only_responses(pairs[0], tmp_path, SETTINGS.but(samples_per_position=2))
    rows = pq.read_table(folder / "train-00000.parquet").to_pylist()
    assert all(
        row["response_ids"] and not row["accept_prob"] and not row["draft_ids"] for row in rows
    )
    generated.clear()
    assert only_responses(pairs[1], tmp_path) == folder and not generated


def test_a_labelled_cache_is_used_for_responses_alone(pairs, tmp_path, generated):
    folder = make(pairs[0], tmp_path)
    generated.clear()
    assert only_responses(pairs[0], tmp_path) == folder
    # Of the other draft: no labels are needed, its responses are
    other = only_responses(pairs[1], tmp_path)
    assert other != folder and not generated


def test_responses_alone_depend_on_the_drafts_window(pairs, tmp_path):
    narrow = replace(pairs[0], draft=tiny_pair(8, window=7).draft)
    assert only_responses(pairs[0], tmp_path) != only_responses(narrow, tmp_path)


def test_announced_sizes_are_those_on_disk(nano, tmp_path, caplog):
    settings = DataGeneration(max_new_tokens=24, batch_size=4, rows_per_shard=6)
    with caplog.at_level("INFO"):
        labels = generate_data(nano, NanoSource(18, 3, 3), settings, tmp_path)
    (responses,) = set(tmp_path.iterdir()) - {labels}
    announced = dict(
        re.findall(
            r"^.*(responses|labels): about (\S+) MB on disk for 24 rows", caplog.text, re.MULTILINE
        )
    )
    for stage, folder in {"responses": responses, "labels": labels}.items():
        written = sum(path.stat().st_size for path in folder.glob("*.parquet"))
        assert written / 1.5 < 1e6 * float(announced[stage]) < 1.5 * written
    assert re.search(
        r"data: labels of 24 prompts, 24 still to do, .* about .* of memory \(weights and all"
        r" in use",
        caplog.text,
    )


@pytest.mark.parametrize(("ends", "all_end"), [(range(8), True), (range(5), False), ([0], None)])
def test_a_target_that_ends_at_once_is_told_before_labels_are_made(tmp_path, caplog, ends, all_end):
    pair = tiny_pair(8, scale=0.5)
    pair.target.generation_config.eos_token_id = list(ends)
    text = "12 responses of tiny-target are an end token alone; look at its chat template"
    if all_end:
        with pytest.raises(UserError, match=f"12 of {text}.*: there is nothing to learn from"):
            make(pair, tmp_path)
    else:
        make(pair, tmp_path)
        assert (f"of {text}" in caplog.text) == (all_end is False)
