"""Stacked heads against each head alone, in float64: logits, gradients, clipping, and training
steps.
"""

import copy

import pytest
import torch

from specheads.heads.head import AcceptanceHead, HeadConfig, set_scale
from specheads.training.heads.bank import HeadBank, HeadSpec, HeadStack

SIZE = 12
NUM_TOKENS = 40


def make_heads(depths, predicts="next_token", width=None):
    heads = []
    for number, depth in enumerate(depths):
        torch.manual_seed(number)
        head = AcceptanceHead(HeadConfig(SIZE, depth, predicts, width=width)).double()
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        head.input_mean.fill_(0.2)
        head.input_scale.fill_(1.3)
        heads.append(head)
    return heads


def lent(stack, heads):
    """Heads of the same shapes that share the memory of a stack."""
    copies = copy.deepcopy(heads)
    stack.lend(copies)
    return copies


@pytest.fixture
def inputs():
    torch.manual_seed(9)
    return torch.randn(NUM_TOKENS, HeadConfig(SIZE).input_size, dtype=torch.float64)


@pytest.mark.parametrize("depths", [[0], [2], [0, 0], [4, 4, 4]], ids=str)
@pytest.mark.parametrize(
    ("predicts", "width"), [("next_token", 7), ("input_token", None), ("input_token", 5)]
)
def test_a_stack_predicts_the_same_as_its_heads(depths, predicts, width, inputs):
    heads = make_heads(depths, predicts, width)
    inputs = inputs[:, : heads[0].config.input_size]
    expected = torch.stack([head.score(inputs) for head in heads])
    torch.testing.assert_close(HeadStack(heads)(inputs), expected, rtol=0, atol=1e-12)


def test_gradients_are_those_of_each_head_alone(inputs):
    heads = make_heads([3, 3, 3, 3])
    stack = HeadStack(heads)
    weights = torch.randn(4, NUM_TOKENS, dtype=torch.float64)
    (stack(inputs) * weights).sum().backward()
    for head, row in zip(heads, weights, strict=True):
        (head.score(inputs) * row).sum().backward()
    gradients = copy.deepcopy(stack)
    for theirs, ours in zip(gradients.parameters(), stack.parameters(), strict=True):
        theirs.data = ours.grad
    for head, scaled in zip(heads, lent(gradients, heads), strict=True):
        for name, parameter in head.named_parameters():
            torch.testing.assert_close(
                dict(scaled.named_parameters())[name].data, parameter.grad, rtol=0, atol=1e-12
            )


def test_each_heads_gradient_is_clipped_by_itself(inputs):
    heads = make_heads([2, 2, 2])
    stack = HeadStack(heads)
    scales = torch.tensor([1e-3, 1.0, 50.0], dtype=torch.float64)
    (stack(inputs).sum(dim=1) * scales).sum().backward()
    stack.clip_gradients(0.5)
    gradients = copy.deepcopy(stack)
    for theirs, ours in zip(gradients.parameters(), stack.parameters(), strict=True):
        theirs.data = ours.grad
    clipped = 0
    for head, scale, scaled in zip(heads, scales, lent(gradients, heads), strict=True):
        (head.score(inputs).sum() * scale).backward()
        clipped += torch.nn.utils.clip_grad_norm_(head.parameters(), 0.5).item() > 0.5
        for name, parameter in head.named_parameters():
            torch.testing.assert_close(
                dict(scaled.named_parameters())[name].data, parameter.grad, rtol=1e-9, atol=1e-12
            )
    assert 0 < clipped < 3


def test_a_bank_learns_what_its_heads_learn_alone():
    """Ten AdamW steps in float64, heads of several depths, inputs and loss weights."""
    kinds = [
        (3, (), 1.0),
        (0, (), 6.0),
        (1, ("hidden", "entropy"), 1.0),
        (2, (), 3.0),
        (1, ("hidden", "entropy"), 12.0),
    ]
    specs = [
        HeadSpec(f"h{n}", HeadConfig(SIZE, depth, inputs=inputs), w)
        for n, (depth, inputs, w) in enumerate(kinds)
    ]
    torch.manual_seed(3)
    features = {"hidden": torch.randn(NUM_TOKENS, SIZE), "embedding": torch.randn(NUM_TOKENS, SIZE)}
    features |= {name: torch.rand(NUM_TOKENS) for name in ("draft_prob", "max_prob", "entropy")}
    features = {name: value.double() for name, value in features.items()}
    labels = torch.rand(NUM_TOKENS, dtype=torch.float64)

    def trained(some):
        bank = HeadBank(some, seed=5).double()
        bank.standardise(features)
        optimizer = torch.optim.AdamW(bank.parameters(), lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            losses, weights = bank.losses(bank(features), labels)
            (losses / weights).sum().backward()
            bank.clip_gradients(0.05)
            optimizer.step()
        return bank

    together = trained(specs)
    assert len(together.stacks) == 4
    for spec in specs:
        alone = trained([spec]).heads[spec.name]
        for name, value in together.heads[spec.name].state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=1e-10)


def test_heads_of_a_stack_share_its_memory(inputs):
    heads = make_heads([2, 2])
    stack = HeadStack(heads)
    first, second = lent(stack, heads)
    torch.nn.init.zeros_(first.readout.weight)
    assert stack(inputs)[0].std() < 1e-12 < stack(inputs)[1].std()
    set_scale(stack, inputs)
    assert torch.equal(second.input_mean, inputs.mean(dim=0))
