"""Checkpoints of SpecDec++'s authors come in exactly."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from specheads import SpeculativeDecoder, Warp
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.heads.head import load_head, save_head

SIZE = 160


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


class Theirs(nn.Module):
    """A network of their shape: one block, applied some times, and two logits of which the second
    accepts.
    """

    def __init__(self, depth, shared=True):
        super().__init__()
        blocks = [Block()] * depth if shared else [Block() for _ in range(depth)]
        self.model = nn.Sequential(*blocks, nn.Linear(SIZE, 2))

    def chance(self, hidden):
        return self.model(hidden).softmax(-1)[..., 1]


def saved(network, depth, folder):
    folder.mkdir()
    save_model(network, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": SIZE, "num_layers": depth}))
    return folder


@pytest.mark.parametrize(("depth", "shared"), [(0, True), (1, True), (3, True), (3, False)])
def test_their_checkpoints_are_read_exactly(depth, shared, tmp_path):
    torch.manual_seed(0)
    network = Theirs(depth, shared).double()
    hidden = torch.randn(50, SIZE, dtype=torch.float64)
    head = load_head(saved(network, depth, tmp_path / "theirs")).double()
    assert (head.config.predicts, head.config.depth, head.config.inputs) == (
        "input_token",
        depth,
        ("hidden",),
    )
    # The file held doubles, our weights pass through float32.
    torch.testing.assert_close(
        head({"hidden": hidden}).sigmoid(), network.chance(hidden), atol=1e-6, rtol=0
    )


def test_a_head_of_theirs_decodes(nano, prompts, tmp_path):
    torch.manual_seed(0)
    head = load_head(saved(Theirs(1), 1, tmp_path / "theirs"))
    greedy = SpeculativeDecoder(nano, warp=Warp(0.0)).generate(prompts[0], 16).tokens
    out = SpeculativeDecoder(nano, stopping=HeadThreshold(head, 0.9), warp=Warp(0.0)).generate(
        prompts[0], 16
    )
    assert torch.equal(out.tokens, greedy) and min(each.num_drafted for each in out.rounds[:1]) >= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.3.bias"),
            r"'model.3.bias' is no such tensor, expected \(2,\)",
        ),
        (
            lambda tensors: tensors.update({"model.3.bias": torch.zeros(1)}),
            r"'model.3.bias' is \(1,\), expected \(2,\)",
        ),
        (
            lambda tensors: tensors.update({"model.7.bias": torch.zeros(1)}),
            r"'model.7.bias' is \(1,\), expected no such tensor",
        ),
        (
            lambda tensors: tensors.pop("model.0.linear.bias"),
            r"'model.0.linear.bias' is no such tensor",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change, message, tmp_path):
    folder = saved(Theirs(3), 3, tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load_head(folder)


def test_a_pickle_is_not_read(tmp_path):
    folder = saved(Theirs(1), 1, tmp_path / "theirs")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="has no model.safetensors.* with weights as safetensors"):
        load_head(folder)


def test_the_command_converts_their_checkpoint(tmp_path):
    torch.manual_seed(0)
    theirs = load_head(saved(Theirs(2), 2, tmp_path / "theirs"))
    ours = load_head(save_head(theirs, tmp_path / "ours"))
    hidden = torch.randn(9, SIZE)
    assert torch.equal(ours({"hidden": hidden}), theirs({"hidden": hidden}))
