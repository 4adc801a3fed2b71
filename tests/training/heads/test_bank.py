"""A bank against each of its heads alone, in float64: logits, losses, gradients, and steps."""

import copy

import pytest
import torch

from specheads.heads.head import AcceptanceHead, HeadConfig, set_scale
from specheads.training.heads.bank import HeadBank, HeadStack, weighted_bce
from specheads.training.heads.settings import HeadSpec

SIZE = 12
NUM_TOKENS = 40
WEIGHTS = [1.0, 6.0, 0.4, 0.0]


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


# --- the loss


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    labels = torch.rand(NUM_TOKENS, generator=generator, dtype=torch.float64)
    labels[:6] = 0  # hard labels are common: most drafted tokens are accepted for certain
    labels[6:12] = 1
    return logits, labels


def formula(logits, labels, reject_weight):
    """The sum of losses over positions and the sum of weights, written with probabilities."""
    probs = 1 / (1 + torch.exp(-logits))
    losses = -(labels * torch.log(probs) + reject_weight * (1 - labels) * torch.log(1 - probs))
    return losses.sum(), (labels + reject_weight * (1 - labels)).sum()


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_loss_and_its_gradient_are_those_of_the_formula(batch, weight):
    logits, labels = batch
    gradients = []
    for loss in (weighted_bce, formula):
        inputs = logits.clone().requires_grad_()
        total, weights = loss(inputs, labels, weight)
        close(total, formula(logits, labels, weight)[0])
        close(weights, formula(logits, labels, weight)[1])
        (total / weights).backward()
        gradients.append(inputs.grad)
    close(*gradients)


def test_extreme_logits_stay_finite_and_cost_their_size():
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    total, weight = weighted_bce(logits, torch.tensor([1.0, 0.0, 0.0, 1.0]), 2.0)
    assert (total.item(), weight.item()) == (2e4 + 1e4, 6)
    total.backward()
    assert logits.grad.tolist() == [0, 0, 2, -1]


# --- stacks


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


def gradients_of(stack, heads):
    """The gradients of a stack, as the weights of heads."""
    gradients = copy.deepcopy(stack)
    for theirs, ours in zip(gradients.parameters(), stack.parameters(), strict=True):
        theirs.data = ours.grad
    return [dict(head.named_parameters()) for head in lent(gradients, heads)]


@pytest.fixture
def inputs():
    torch.manual_seed(9)
    return torch.randn(NUM_TOKENS, HeadConfig(SIZE).input_size, dtype=torch.float64)


@pytest.mark.parametrize("depths", [[0], [2], [4, 4, 4]], ids=str)
@pytest.mark.parametrize(
    ("predicts", "width"), [("next_token", 7), ("input_token", None), ("input_token", 5)]
)
def test_a_stack_predicts_the_same_as_its_heads(depths, predicts, width, inputs):
    heads = make_heads(depths, predicts, width)
    inputs = inputs[:, : heads[0].config.input_size]
    expected = torch.stack([head.score(inputs) for head in heads])
    torch.testing.assert_close(HeadStack(heads)(inputs), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("largest", [None, 0.5], ids=["whole", "clipped"])
def test_gradients_are_those_of_each_head_alone(inputs, largest):
    heads = make_heads([3, 3, 3])
    stack = HeadStack(heads)
    weights = torch.randn(3, NUM_TOKENS, dtype=torch.float64)
    weights *= torch.tensor([[1e-3], [1.0], [50.0]])
    (stack(inputs) * weights).sum().backward()
    if largest:
        stack.clip_gradients(largest)
    clipped = 0
    for head, row, found in zip(heads, weights, gradients_of(stack, heads), strict=True):
        (head.score(inputs) * row).sum().backward()
        if largest:
            norm = torch.nn.utils.clip_grad_norm_(head.parameters(), largest)
            clipped += norm.item() > largest
        for name, parameter in head.named_parameters():
            torch.testing.assert_close(found[name].data, parameter.grad, rtol=1e-9, atol=1e-12)
    assert not largest or 0 < clipped < 3


def test_heads_of_a_stack_share_its_memory(inputs):
    heads = make_heads([2, 2])
    stack = HeadStack(heads)
    first, second = lent(stack, heads)
    torch.nn.init.zeros_(first.readout.weight)
    assert stack(inputs)[0].std() < 1e-12 < stack(inputs)[1].std()
    set_scale(stack, inputs)
    assert torch.equal(second.input_mean, inputs.mean(dim=0))


# --- banks


def test_a_bank_learns_and_predicts_what_its_heads_do_alone():
    """Ten AdamW steps in float64, heads of several depths, inputs and loss weights."""
    kinds = [
        (3, (), 1.0),
        (0, (), 6.0),
        (1, ("hidden", "entropy"), 1.0),
        (2, (), 3.0),
        (1, ("hidden", "entropy"), 12.0),
    ]
    specs = []
    for depth, names, weight in kinds:
        config = HeadConfig(SIZE, depth, inputs=names)
        specs.append(HeadSpec(f"{depth} {weight}", config, weight))
    torch.manual_seed(3)
    features = {}
    for name in ("hidden", "embedding"):
        features[name] = torch.randn(NUM_TOKENS, SIZE, dtype=torch.float64)
    for name in ("draft_prob", "max_prob", "entropy"):
        features[name] = torch.rand(NUM_TOKENS, dtype=torch.float64)
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
    logits = together(features)
    for spec, row in zip(specs, logits, strict=True):
        head = together.heads[spec.name]
        close(head(features), row)
        alone = trained([spec]).heads[spec.name]
        for name, value in head.state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=1e-10)


def test_a_heads_start_depends_on_the_seed_alone():
    def weights(seed, *depths):
        state = torch.get_rng_state()
        bank = HeadBank([HeadSpec(f"{each}", HeadConfig(SIZE, each)) for each in depths], seed)
        assert torch.equal(torch.get_rng_state(), state)
        return bank.heads["2"].state_dict()

    alone = weights(4, 2)
    among = weights(4, 3, 2)
    assert all(torch.equal(value, among[name]) for name, value in alone.items())
    assert not torch.equal(weights(5, 2)["readout.weight"], alone["readout.weight"])
