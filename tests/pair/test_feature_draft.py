"""EAGLE-3's draft against the reference implementation, whose outputs are in tests/fixtures."""

import pytest
import torch
from commands import ROOT
from safetensors.torch import load_file
from transformers import DynamicCache, LlamaConfig

from specheads.pair.eagle_formats import read_feature_draft

FIXTURES = ROOT / "tests" / "fixtures" / "eagle3"
CASES = sorted(folder.name for folder in FIXTURES.iterdir())
TARGET = LlamaConfig(vocab_size=40, hidden_size=16, num_attention_heads=2, num_hidden_layers=8)


class Case:
    """A draft, and what the reference reads and computes along one text."""

    def __init__(self, name):
        self.model = read_feature_draft(FIXTURES / name, TARGET)
        reference = load_file(FIXTURES / name / "reference.safetensors")
        self.features = reference["features"][None]
        self.tokens = reference["tokens"][None]
        self.states = reference["states"]  # (steps, T, H)
        self.logits = reference["logits"]  # (steps, T, V_draft)
        self.normed = self.model.config.norm_output

    def check(self, output, steps, positions):
        """Compare outputs (n, H) with those of the reference after some steps at some positions."""
        states = self.states[steps, positions]
        expected = self.model.norm(states) if self.normed else states
        torch.testing.assert_close(output.state, expected, atol=1e-5, rtol=0)
        logits = self.model.lm_head(output.hidden)
        torch.testing.assert_close(logits, self.logits[steps, positions], atol=1e-5, rtol=0)


@pytest.fixture(params=CASES)
def case(request):
    with torch.no_grad():
        yield Case(request.param)


def at(output, positions):
    """Return the outputs of each row at its position."""
    rows = torch.arange(len(positions))
    return type(output)(*(part[rows, positions] for part in output))


def test_first_steps_equal_the_references(case):
    output = case.model(case.tokens, case.model.first_states(case.features))
    whole = torch.arange(case.tokens.shape[1])
    case.check(type(output)(*(part[0] for part in output)), torch.zeros_like(whole), whole)


def test_own_steps_of_rows_of_different_lengths_equal_the_references(case):
    """The reference's step j at position i sees the keys of the first step up to i and its own."""
    lengths = torch.tensor([7, 4, 1])
    longest = int(lengths.max())
    tokens = torch.zeros(len(lengths), longest, dtype=torch.long)
    features = torch.zeros(len(lengths), longest, case.features.shape[-1])
    for row, length in enumerate(lengths.tolist()):
        tokens[row, longest - length :] = case.tokens[0, :length]
        features[row, longest - length :] = case.features[0, :length]
    positions = torch.arange(longest) - (longest - lengths[:, None])
    mask = (positions >= 0).long()
    cache = DynamicCache()
    output = case.model(
        tokens, case.model.first_states(features), positions.clamp_min(0), mask, cache
    )
    last = at(output, torch.full_like(lengths, longest - 1))
    case.check(last, torch.zeros_like(lengths), lengths - 1)
    for step in range(1, len(case.states)):
        read = case.tokens[0, lengths - 1 + step]
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        position = lengths[:, None] - 1 + step
        output = case.model(read[:, None], last.state[:, None], position, mask, cache)
        last = at(output, torch.zeros_like(lengths))
        case.check(last, torch.full_like(lengths, step), lengths - 1)


def test_a_round_reads_features_after_own_states_are_dropped(case):
    """Two rounds: the second reads the accepted tokens with the target's features."""
    cache = DynamicCache()
    states = case.model.first_states(case.features)
    output = case.model(case.tokens[:, :3], states[:, :3], past_key_values=cache)
    for read in (3, 4):
        output = case.model(
            case.tokens[:, read : read + 1], output.state[:, -1:], past_key_values=cache
        )
    case.check(at(output, [0]), torch.tensor([2]), torch.tensor([2]))
    cache.crop(-2)
    output = case.model(case.tokens[:, 3:6], states[:, 3:6], past_key_values=cache)
    case.check(at(output, [2]), torch.tensor([0]), torch.tensor([5]))
    output = case.model(case.tokens[:, 6:7], output.state[:, -1:], past_key_values=cache)
    case.check(at(output, [0]), torch.tensor([1]), torch.tensor([5]))
