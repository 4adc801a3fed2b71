"""A head's network that one operator computes, computes what torch computes.

What the operator does not have is left to torch.
"""

import pytest
import torch
from fakes import needs_compiler, tiny_pair
from torch import nn

from specheads import AcceptanceHead, HeadConfig
from specheads.decoding.engine.cpu import CpuOperations
from specheads.decoding.engine.cpu.packed import _is_network, _PackedNetwork, packed_model
from specheads.decoding.engine.reading import computing

pytestmark = [needs_compiler, pytest.mark.usefixtures("built_operators")]

ALL = ("hidden", "embedding", "draft_prob", "max_prob", "entropy")
CONFIGS = {
    "default": {"hidden_size": 160, "inputs": ALL, "depth": 3, "width": 20},
    "no blocks": {"hidden_size": 7, "inputs": ALL, "depth": 0, "width": 5},
    "several panels, an odd number of blocks": {
        "hidden_size": 70,
        "inputs": ALL,
        "depth": 1,
        "width": 100,
    },
    "a width of one": {"hidden_size": 3, "inputs": ("hidden",), "depth": 2, "width": 1},
    "shared by threads": {
        "hidden_size": 640,
        "inputs": ("hidden", "embedding"),
        "depth": 2,
        "width": 160,
    },
    "the paper's, without a projection": {
        "hidden_size": 64,
        "inputs": ("hidden",),
        "depth": 4,
        "predicts": "input_token",
    },
}


def random_head(config, dtype):
    torch.manual_seed(0)
    head = AcceptanceHead(HeadConfig(**config)).requires_grad_(False)
    for tensor in (*head.parameters(), *head.buffers()):
        tensor.normal_(std=0.2)
    return head.to(dtype)


def features_of(head, *shape):
    generator = torch.Generator().manual_seed(1)
    size = head.config.hidden_size
    sizes = {"hidden": (size,), "embedding": (size,)}
    return {
        name: torch.rand((*shape, *sizes.get(name, ())), generator=generator, dtype=torch.float64)
        for name in head.config.inputs
    }


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_logits_of_a_head(name, dtype, threads):
    head = random_head(CONFIGS[name], dtype)
    packed = packed_model(tiny_pair().draft_lm, [head])
    assert any(isinstance(copied, _PackedNetwork) for copied in packed.copies)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((), (1,), (5,), (3, 14)):
            features = features_of(head, *shape)
            expected = head.double()(features)
            head.to(dtype)
            with computing(CpuOperations(packed.networks)):
                actual = head(features)
            assert actual.dtype == dtype and actual.shape == shape
            near = 1e-12 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(actual.double(), expected, atol=near, rtol=near)
    finally:
        torch.set_num_threads(before)


def learns(head):
    head.blocks[1].linear.weight.add_(0.5)


def is_scaled_anew(head):
    head.input_mean.add_(0.1)


def is_written_past_the_version_counter(head):
    head.blocks[1].linear.weight.data.mul_(1.5)


@pytest.mark.parametrize("change", [learns, is_scaled_anew, is_written_past_the_version_counter])
def test_a_head_that_changes_is_packed_anew(change):
    head = random_head(CONFIGS["default"], torch.float64)
    features = features_of(head, 2)
    packed_model(tiny_pair().draft_lm, [head])
    change(head)
    expected = head(features)
    with computing(CpuOperations(packed_model(tiny_pair().draft_lm, [head]).networks)):
        torch.testing.assert_close(head(features), expected, atol=1e-12, rtol=0)


def test_what_the_operator_does_not_have_is_left_to_torch():
    head = random_head(CONFIGS["default"], torch.float32)
    assert _is_network(head) and not _is_network(nn.Linear(3, 3))
    assert not _is_network(head.to(torch.bfloat16))
    packed = packed_model(tiny_pair().draft_lm, [head])
    assert not any(isinstance(copied, _PackedNetwork) for copied in packed.copies)


class Shifted(AcceptanceHead):
    def score(self, inputs):
        return super().score(inputs) + 1


@pytest.mark.parametrize("part", ["the class", "a block", "a map", "a hook"])
def test_a_network_that_computes_something_else_is_left_to_torch(part):
    head = random_head(CONFIGS["default"], torch.float32)
    if part == "the class":
        head = Shifted(head.config)
    elif part == "a block":
        head.blocks[1] = nn.Sequential(head.blocks[1])
        head.blocks[1].linear = head.blocks[1][0].linear
    elif part == "a map":
        head.readout = type("Other", (nn.Linear,), {})(20, 1)
    else:
        head.blocks[0].register_forward_hook(lambda block, inputs, output: 2 * output)
    assert not _is_network(head)
