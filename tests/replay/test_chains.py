"""Recordings of drafts that read their target, against a plain loop over both models."""

import pytest
import torch
from families import family_pair
from feature_drafts import features_of, reading_pair
from transformers import DynamicCache

from specheads import AcceptanceHead, HeadConfig, Warp
from specheads.heads.features import RECORDED, drafting_features
from specheads.prompts.prompt import Prompt, ResponseLimits
from specheads.replay.head_scores import add_predictions, head_fingerprint
from specheads.replay.recording import GROUND_TRUTH, Recorder, load_recording
from specheads.replay.response_tree import RecordSettings

MAX_TOKENS = 6
PROMPTS = [[4], [3, 1, 20], [7, 7, 2, 11, 5]]
INPUTS = ("hidden", "embedding", "second_prob", "depth")
KEPT = torch.arange(0, 29, 2)


@pytest.fixture(scope="module")
def pair():
    pair = family_pair("llama")
    pair.target.generation_config.eos_token_id = 5
    return reading_pair(pair, layers=(0, 1), kept=KEPT, norm_output=True)


@pytest.fixture(scope="module", params=[Warp(0), Warp(1.0)], ids=["greedy", "sampled"])
def warp(request):
    return request.param


@pytest.fixture(scope="module")
def head(pair):
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(32, 1, "next_token", INPUTS, 8)).eval().requires_grad_(False)
    torch.nn.init.normal_(head.readout.weight, std=2.0)
    return head


@pytest.fixture(scope="module")
def folder(pair, warp, head, tmp_path_factory):
    prompts = [(Prompt(f"{i:04x}", "test", ""), ids) for i, ids in enumerate(PROMPTS)]
    settings = RecordSettings(3, MAX_TOKENS)
    limits = ResponseLimits(24, batch_size=4)
    made = Recorder(pair, warp, limits, settings, 0, tmp_path_factory.mktemp("chains"))
    (folder,) = made.record([prompts])
    add_predictions(folder, pair, {head_fingerprint(head): head}, ground_truth=True)
    return folder


@pytest.fixture
def recording(folder, head):
    return load_recording(folder, [head_fingerprint(head), GROUND_TRUTH])


def states_by_loop(pair, committed, drafted):
    """The states (n, H) that `drafted` tokens are predicted from after the committed ones."""
    draft = pair.draft
    features = features_of(pair.target, torch.tensor(committed), draft.config.target_layers)
    cache = DynamicCache()
    states = draft.first_states(features[None, :-1])
    output = draft(torch.tensor([committed[1:]]), states, past_key_values=cache)
    hidden = [output.hidden[0, -1]]
    for token in drafted[:-1]:
        output = draft(torch.tensor([[token]]), output.state[:, -1:], past_key_values=cache)
        hidden.append(output.hidden[0, -1])
    return torch.stack(hidden)


def drafts_of(recording):
    """Each recorded draft: its sample, its text before it, and its nodes."""
    for number, prompt in enumerate(recording.prompts):
        response = recording.response(number)
        first = int(recording.first[number])
        for start in range(len(response)):
            for sample in range(recording.num_samples):
                node = int(recording.branch_first[sample, first + start])
                count = int(recording.branch_length[sample, first + start])
                committed = [*prompt, *response[:start]]
                yield sample, first + start, committed, response[start:], range(node, node + count)


def test_every_token_has_the_features_and_predictions_of_a_plain_loop(pair, warp, head, recording):
    lm = pair.draft_lm
    lengths = set()
    for _, _, committed, _, nodes in drafts_of(recording):
        lengths.add(len(nodes))
        if not nodes:
            continue
        tokens = recording.tokens[list(nodes)]
        hidden = states_by_loop(pair, committed, tokens.tolist())
        logits = lm.logits(hidden)
        features = drafting_features(
            {*RECORDED, *INPUTS},
            logits,
            tokens,
            hidden,
            lm.embed,
            depth=torch.arange(len(tokens)),
        )
        expected = {name: features[name] for name in RECORDED}
        expected[head_fingerprint(head)] = head(features)
        for name, values in expected.items():
            found = recording.features[name][list(nodes)]
            torch.testing.assert_close(found, values.float(), rtol=1e-5, atol=1e-5)
    assert {0, MAX_TOKENS} < lengths


def test_drafts_follow_the_response_as_far_as_they_are_accepted(pair, warp, recording):
    accepted = {True: 0, False: 0}
    for sample, place, committed, later, nodes in drafts_of(recording):
        count = int(recording.branch_accepted[sample, place])
        tokens = recording.tokens[list(nodes)].tolist()
        assert tokens[:count] == later[:count]
        if not nodes:
            # No state is before a text of one token; the last token before the limit is the
            # target's.
            is_last = len(later) == 1 and not recording.finished.all()
            assert len(committed) == 1 or is_last
        if warp.greedy and count < len(tokens):
            assert tokens[count] != later[count]
        if count < len(tokens) and len(later) > count:
            hidden = states_by_loop(pair, committed, [*tokens[:count], 0])[-1:]
            draft = warp(pair.draft_lm.logits(hidden))[0]
            text = torch.tensor([[*committed, *tokens[:count]]])
            target = warp(pair.target_lm.logits(pair.target_lm.hidden_states(text)))[0, -1]
            assert draft[tokens[count]] > target[tokens[count]]  # or it would not be rejected
        accepted[count > 0] += 1
    assert min(accepted.values()) > 1


def test_true_probabilities_are_those_of_both_distributions(pair, warp, recording):
    for _, _, committed, _, nodes in drafts_of(recording):
        survival = 1.0
        tokens = recording.tokens[list(nodes)].tolist()
        if not tokens:
            continue
        draft = warp(pair.draft_lm.logits(states_by_loop(pair, committed, tokens)))
        text = torch.tensor([[*committed, *tokens[:-1]]])
        states = pair.target_lm.hidden_states(text)[0, len(committed) - 1 :]
        target = warp(pair.target_lm.logits(states))
        for index, (node, token) in enumerate(zip(nodes, tokens, strict=True)):
            expected = min(1.0, float(target[index, token] / draft[index, token]))
            if survival >= 0.06:  # further the target may not read
                found = recording.features[GROUND_TRUTH][node].item()
                assert found == pytest.approx(expected, abs=1e-5)
            survival *= expected


def test_labels_are_the_tokens_up_to_the_first_rejected_one(recording):
    tokens = recording.labels()
    expected = []
    for sample, place, _, _, nodes in drafts_of(recording):
        count = int(recording.branch_accepted[sample, place])
        for index, node in enumerate(nodes[: count + 1]):
            after = node + 1 if node + 1 in nodes else -1
            expected.append((node, after, index < count, index, index))
    columns = (tokens.node, tokens.after, tokens.accepted, *tokens.indices)
    found = zip(*(column.tolist() for column in columns), strict=True)
    assert sorted(found) == sorted(expected)
    assert int(tokens.indices.furthest.max()) > 0
