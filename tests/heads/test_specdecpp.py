"""Checkpoints of SpecDec++'s authors come in exactly, and go out where their network can hold them."""

import json

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from specheads import SpeculativeDecoder, Warp
from specheads.decoding.stopping import HeadThreshold
from specheads.errors import UserError
from specheads.heads.head import AcceptanceHead, HeadConfig, load_head, save_head
from specheads.integrations.formats import write_theirs

SIZE = 160


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + torch.nn.functional.silu(self.linear(x))


class Theirs(nn.Module):
    """A network of their shape: one block, applied some times, and two logits of which the second accepts."""

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
    network, hidden = Theirs(depth, shared).double(), torch.randn(50, SIZE, dtype=torch.float64)
    head = load_head(saved(network, depth, tmp_path / "theirs")).double()
    assert (head.config.predicts, head.config.depth, head.config.inputs) == ("input_token", depth, ("hidden",))
    # The file held doubles, our weights pass through float32.
    torch.testing.assert_close(head({"hidden": hidden}).sigmoid(), network.chance(hidden), atol=1e-6, rtol=0)


def test_shared_blocks_are_stored_once(tmp_path):
    folder = saved(Theirs(3), 3, tmp_path / "theirs")
    assert sorted(load_file(folder / "model.safetensors")) == [
        "model.0.linear.bias",
        "model.0.linear.weight",
        "model.3.bias",
        "model.3.weight",
    ]


def test_a_head_of_theirs_decodes(nano, prompts, tmp_path):
    torch.manual_seed(0)
    head = load_head(saved(Theirs(1), 1, tmp_path / "theirs"))
    greedy = SpeculativeDecoder(nano, warp=Warp(0.0)).generate(prompts[0], 16).tokens
    out = SpeculativeDecoder(nano, stopping=HeadThreshold(head, 0.9), warp=Warp(0.0)).generate(prompts[0], 16)
    assert torch.equal(out.tokens, greedy) and min(each.num_drafted for each in out.rounds[:1]) >= 2


@pytest.mark.parametrize("depth", [0, 1])
def test_our_heads_are_written_exactly(depth, tmp_path):
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(hidden_size=SIZE, predicts="input_token", depth=depth))
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.1)
    head.input_mean.normal_()
    if not depth:
        head.input_scale.uniform_(0.5, 2.0)
    network = Theirs(depth)
    folder = write_theirs(head.eval(), tmp_path)
    load_model(network, folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text()) == {"hidden_size": SIZE, "num_layers": depth}
    hidden = torch.randn(50, SIZE)
    torch.testing.assert_close(network.chance(hidden), head({"hidden": hidden}).sigmoid(), atol=1e-5, rtol=0)
    back = load_head(folder)
    torch.testing.assert_close(back({"hidden": hidden}), head({"hidden": hidden}), atol=1e-4, rtol=1e-5)


def test_a_calibration_that_is_left_out_is_logged(tmp_path, caplog):
    calibration = {"slope": [1.2], "intercept": [0.1]}
    write_theirs(AcceptanceHead(HeadConfig(hidden_size=SIZE, predicts="input_token", depth=0, calibration=calibration)), tmp_path)
    assert "no calibration by index" in caplog.text


def with_scale(head):
    head.input_scale.fill_(2.0)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ({"predicts": "next_token"}, None, "it reads hidden, embedding, draft_prob"),
        (
            {"predicts": "input_token", "inputs": ("hidden", "entropy")},
            None,
            "it reads hidden, entropy with predicts=input_token",
        ),
        ({"predicts": "input_token", "width": 8}, None, "it reads hidden"),
        ({"predicts": "input_token", "depth": 2}, None, "it has 2 blocks"),
        ({"predicts": "input_token", "depth": 1}, with_scale, "it scales its inputs"),
    ],
)
def test_a_head_that_their_network_cannot_compute_is_refused(kind, change, reason, tmp_path):
    head = AcceptanceHead(HeadConfig(hidden_size=SIZE, **kind))
    if change is not None:
        change(head)
    with pytest.raises(UserError, match=f"format=specdecpp cannot hold this head: {reason}"):
        write_theirs(head, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.3.bias"), r"'model.3.bias' is no such tensor, expected \(2,\)"),
        (lambda tensors: tensors.update({"model.3.bias": torch.zeros(1)}), r"'model.3.bias' is \(1,\), expected \(2,\)"),
        (lambda tensors: tensors.update({"model.7.bias": torch.zeros(1)}), r"'model.7.bias' is \(1,\), expected no such tensor"),
        (lambda tensors: tensors.pop("model.0.linear.bias"), r"'model.0.linear.bias' is no such tensor"),
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
    with pytest.raises(UserError, match="Its weights are a pickle, which is not read"):
        load_head(folder)


def test_the_command_converts_their_checkpoint(tmp_path):
    torch.manual_seed(0)
    theirs = load_head(saved(Theirs(2), 2, tmp_path / "theirs"))
    ours = load_head(save_head(theirs, tmp_path / "ours"))
    hidden = torch.randn(9, SIZE)
    assert torch.equal(ours({"hidden": hidden}), theirs({"hidden": hidden}))
