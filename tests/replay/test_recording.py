import numpy as np
import pytest
import torch
from families import family_pair

from specheads import AcceptanceHead, HeadConfig, Warp
from specheads.decoding.rounds import TargetRounds
from specheads.heads.features import drafting_features
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay import recording as module
from specheads.replay.head_scores import add_predictions, head_fingerprint, record_sets
from specheads.replay.recording import GROUND_TRUTH, Recorder, load_recording
from specheads.replay.response_tree import RecordSettings


@pytest.fixture(scope="module")
def pair():
    return family_pair("llama")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "ROWS_PER_SHARD", 2)


SAMPLED = Warp(1.0)


def make(pair, folder, count=5, warp=SAMPLED, num_samples=2, seed=0):
    generator = np.random.default_rng(7)
    prompts = [
        (Prompt(f"{i:04x}", "test", ""), generator.integers(29, size=3 + i).tolist())
        for i in range(count)
    ]
    return Recorder(
        pair, warp, ResponseLimits(12), RecordSettings(num_samples, 4), seed, folder
    ).record([prompts])[0]


def head(seed, predicts="next_token", **kwargs):
    torch.manual_seed(seed)
    head = (
        AcceptanceHead(HeadConfig(32, 1, predicts, width=8, **kwargs)).eval().requires_grad_(False)
    )
    torch.nn.init.normal_(head.readout.weight)
    return head


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))
    }


class Stop(Exception):
    pass


def test_a_stopped_recording_is_resumed_to_the_same_bytes(pair, tmp_path, monkeypatch):
    whole = make(pair, tmp_path / "whole")
    record_responses = module.record_responses
    calls = []

    def stop_at_the_second_shard(*args):
        calls.append(args)
        if len(calls) == 2:
            raise Stop
        return record_responses(*args)

    monkeypatch.setattr(module, "record_responses", stop_at_the_second_shard)
    with pytest.raises(Stop):
        make(pair, tmp_path / "cut")
    (half,) = (tmp_path / "cut" / "recordings").iterdir()
    assert len(contents(half)) == 1 and (half / ".responses.jsonl").is_file()
    first = next(half.glob("*.parquet")).stat().st_mtime_ns
    monkeypatch.setattr(TargetRounds, "take", None)  # no response is made again
    cut = make(pair, tmp_path / "cut")
    assert (
        contents(cut) == contents(whole)
        and len(contents(whole)) == 3
        and not (half / ".responses.jsonl").exists()
    )
    assert min(path.stat().st_mtime_ns for path in cut.glob("*.parquet")) == first


def test_a_damaged_shard_is_made_again_and_a_complete_recording_is_not(pair, tmp_path):
    folder = make(pair, tmp_path)
    before = contents(folder)
    path = folder / "000002-2.parquet"
    path.write_bytes(path.read_bytes()[:-3])
    assert make(pair, tmp_path) == folder and contents(folder) == before
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    make(pair, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times


def test_other_settings_are_another_recording(pair, tmp_path):
    folders = [
        make(pair, tmp_path),
        make(pair, tmp_path, seed=1),
        make(pair, tmp_path, num_samples=3),
        make(pair, tmp_path, warp=Warp(0.5)),
    ]
    assert len(set(folders)) == 4
    # Greedy decoding has only one outcome, however many samples are asked for.
    assert make(pair, tmp_path, warp=Warp(0), num_samples=2) == make(
        pair, tmp_path, warp=Warp(0), num_samples=3
    )


def test_predictions_are_those_of_decoding_and_are_made_once(pair, tmp_path):
    folder = make(pair, tmp_path)
    heads = {head_fingerprint(new): new for new in (head(0), head(1), head(2, "input_token"))}
    first = next(iter(heads))
    add_predictions(folder, pair, {first: heads[first]}, ground_truth=False)
    (before,) = [
        path.stat().st_mtime_ns for path in (folder / "predictions" / first).glob("manifest.json")
    ]
    passes = []
    add_predictions(folder, pair, heads, ground_truth=True, advance=passes.append)
    assert passes == [1] * 10  # one pass for both new heads, one of the target
    assert (folder / "predictions" / first / "manifest.json").stat().st_mtime_ns == before
    add_predictions(folder, pair, heads, ground_truth=True, advance=passes.append)
    assert passes[10:] == [5, 5]  # nothing is left to do for either
    recording = load_recording(folder, [*heads, GROUND_TRUTH])
    nodes = {}
    for number in range(5):
        start = int(recording.first[number])
        response = recording.response(number)
        nodes |= {
            start + i: (recording.prompts[number] + response[:i], token)
            for i, token in enumerate(response)
        }
        for draw in range(2):
            for i in range(len(response)):
                branch = int(recording.branch_first[draw, start + i])
                length = int(recording.branch_length[draw, start + i])
                drafted = recording.tokens[branch : branch + length].tolist()
                text = recording.prompts[number] + response[:i]
                nodes |= {branch + k: (text + drafted[:k], drafted[k]) for k in range(length)}
    assert sorted(nodes) == list(range(len(recording.tokens)))
    for node, (text, token) in nodes.items():
        assert recording.tokens[node] == token
        hidden = pair.draft_lm.hidden_states(torch.tensor([text]), use_cache=False)[:, -1]
        features = drafting_features(
            heads[first].config.inputs,
            pair.draft_lm.logits(hidden),
            torch.tensor([token]),
            hidden,
            pair.draft_lm.embed,
        )
        for name, predictor in heads.items():
            assert recording.features[name][node] == pytest.approx(
                predictor(features).item(), abs=1e-4
            )


def test_labels_pair_every_proposed_token_with_its_outcome_and_the_next_token(pair, tmp_path):
    recording = load_recording(make(pair, tmp_path))
    *labels, indices = recording.labels()
    labels = [value.tolist() for value in (*labels, indices.furthest)]
    assert not indices.nearest.any()
    expected = []
    for draw in range(2):
        for number in range(5):
            start = int(recording.first[number])
            length = int(recording.lengths[number])
            run = 0
            for i in range(start, start + length):
                furthest = min(run, recording.max_tokens - 1)
                run = run + 1 if recording.accepted[draw, i] else 0
                branch = int(recording.branch_first[draw, i])
                size = int(recording.branch_length[draw, i])
                if recording.accepted[draw, i] and i - start < recording.limits[number] - 1:
                    expected.append((i, i + 1 if i + 1 < start + length else -1, True, furthest))
                elif size:
                    expected.append((branch, branch + 1 if size > 1 else -1, False, furthest))
    assert list(zip(*labels, strict=True)) == expected
    assert {furthest for *_, furthest in expected} == {0, 1, 2, 3}


def test_every_node_belongs_to_the_response_that_it_was_recorded_for(pair, tmp_path):
    recording = load_recording(make(pair, tmp_path))
    draw, position = recording.branch_length.nonzero(as_tuple=True)
    response = torch.repeat_interleave(torch.arange(recording.num_prompts), recording.lengths)
    assert torch.equal(recording.prompt_of(torch.arange(len(response))), response)
    for last in (0, 1):  # the first node of a branch and the last one
        node = recording.branch_first[draw, position] + last * (
            recording.branch_length[draw, position] - 1
        )
        assert len(node) > 0 and torch.equal(recording.prompt_of(node), response[position])


def test_every_set_is_recorded_with_the_predictions_of_heads_and_of_the_target(pair, tmp_path):
    sets = {
        name: [(Prompt(f"{count}{number}", name, ""), [number + 1, 2]) for number in range(count)]
        for name, count in (("dev", 2), ("test", 1))
    }
    recorder = Recorder(pair, SAMPLED, ResponseLimits(12), RecordSettings(2, 4), 0, tmp_path)
    heads = [head(1), head(2)]
    prints = {head_fingerprint(each) for each in heads}
    found = record_sets(recorder, sets, heads, ground_truth=True)
    assert {name: each.num_prompts for name, each in found.items()} == {"dev": 2, "test": 1}
    for each in found.values():
        assert prints | {GROUND_TRUTH} <= set(each.features)
    plain = record_sets(recorder, sets, [], ground_truth=False)["dev"]
    assert not (prints | {GROUND_TRUTH}) & set(plain.features)
