"""Labels from the states with which the target wrote its responses."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from fakes import tiny_pair

from specheads.data_gen.run import LabelStage, ResponseStage, Stage, generate_data, next_stage
from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import LABELS
from specheads.pair.sampling import Warp
from specheads.prompts.prompt import Prompt

SETTINGS = DataGeneration(
    warp=Warp(1.0, top_k=5), max_new_tokens=9, max_prompt_tokens=8, batch_size=4, rows_per_shard=2
)


def letters():
    """24 prompts of four letters."""
    prompts = []
    for number in range(24):
        text = format(number, "05b").translate(str.maketrans("01", "ab"))
        split = ("train", "train", "dev", "test")[number % 4]
        prompts.append(Prompt(format(number, "016x"), split, text))
    return prompts


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setenv("SPECHEADS_ENGINE", "eager")


def in_single_precision():
    pair = tiny_pair(8, scale=2.0)
    pair.target.generation_config.eos_token_id = 0
    return replace(pair, target=pair.target.float(), draft=pair.draft.float())


def made(root, pair=None, labelled=True):
    return generate_data(
        pair or in_single_precision(), letters(), SETTINGS, root, labelled=labelled
    )


def rows_of(folder):
    rows = []
    for path in sorted(folder.glob("*.parquet")):
        rows += pq.read_table(path).to_pylist()
    return rows


def content(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing interrupted."""
    root = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECHEADS_ENGINE", "eager")
        made(root)
    return root


class ReadTokens:
    """How many tokens a pair's target has read."""

    def __init__(self, pair):
        self.number = 0
        pair.target.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.number += kwargs["input_ids"].numel()

    def during(self, call):
        before = self.number
        call()
        return self.number - before


def test_labels_from_kept_states_are_those_of_a_second_reading(whole, tmp_path):
    made(tmp_path, labelled=False)
    again = rows_of(made(tmp_path))
    kept = rows_of(made(whole))
    assert len(kept) == 24
    for row, other in zip(kept, again, strict=True):
        for name in ("prompt_id", "response_ids", "draft_ids", "more_draft_ids"):
            assert row[name] == other[name]
        assert row["accept_prob"] == pytest.approx(other["accept_prob"], abs=1e-5)
        for probs, expected in zip(row["more_accept_prob"], other["more_accept_prob"], strict=True):
            assert probs == pytest.approx(expected, abs=1e-5)
        assert len(row["accept_prob"]) == len(row["response_ids"])
    assert {name for name in kept[0] if name in LABELS} == set(LABELS)
    assert not any(path.suffix == ".states" for path in content(tmp_path))


def test_the_target_reads_each_text_once(tmp_path):
    pair = in_single_precision()
    read = ReadTokens(pair)
    alone = tmp_path / "responses"
    made(alone, pair, labelled=False)  # which also reads to check the model
    in_writing = read.during(lambda: made(tmp_path / "again", pair, labelled=False))
    assert read.during(lambda: made(tmp_path / "labelled", pair)) == in_writing
    assert read.during(lambda: made(alone, pair)) >= in_writing


# --- a run that ends early


class Killed(BaseException):
    """Not an error that anything handles."""


def killed_at(root, step):
    """Make the data until `step` of all steps of writing or labelling; return whether it ended
    before.
    """
    pair = in_single_precision()
    left = step

    def advance(*done):
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed

    try:
        while isinstance(found := next_stage(pair, letters(), SETTINGS, root), Stage):
            with found.store.missing(list(found.shards)) as missing:
                for lot in found.lots(missing):
                    found.make(lot, advance)
                found.complete()
    except Killed:
        return True
    return False


def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(whole, tmp_path):
    kills = 0
    for step in range(3, 200, 7):
        root = tmp_path / str(step)
        if not killed_at(root, step):
            break
        kills += 1
        made(root)
        assert content(root) == content(whole)
    assert kills > 5


def test_states_that_do_not_fit_the_responses_are_not_used(whole, tmp_path):
    pair = in_single_precision()
    stage = next_stage(pair, letters(), SETTINGS, tmp_path)
    assert isinstance(stage, ResponseStage)
    stage.run()
    states = sorted(path for path in stage.store.folder.iterdir() if path.suffix == ".states")
    assert len(states) == len(stage.shards)
    states[0].write_bytes(states[1].read_bytes())
    states[2].write_bytes(b"damaged")
    stage = next_stage(pair, letters(), SETTINGS, tmp_path)
    assert isinstance(stage, LabelStage)
    stage.run()
    for row, other in zip(rows_of(stage.store.folder), rows_of(made(whole)), strict=True):
        assert row["accept_prob"] == pytest.approx(other["accept_prob"], abs=1e-5)
    assert not [path for path in content(tmp_path) if path.suffix == ".states"]


def test_responses_without_labels_and_long_ones_have_no_states(tmp_path):
    pair = in_single_precision()
    stage = next_stage(pair, letters(), SETTINGS, tmp_path, labelled=False)
    assert not stage.with_states
    long = SETTINGS.but(max_new_tokens=10**9)
    assert not next_stage(pair, letters(), long, tmp_path).with_states
