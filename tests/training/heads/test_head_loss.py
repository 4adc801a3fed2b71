import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from specheads.heads.head import HeadConfig
from specheads.training.heads.bank import HeadBank, HeadSpec
from specheads.training.heads.head_loss import weighted_bce

WEIGHTS = [1.0, 6.0, 0.4, 0.0]


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, generator=generator, dtype=torch.float64)
    labels = torch.rand(40, generator=generator, dtype=torch.float64)
    labels[:6], labels[6:12] = (
        0,
        1,
    )  # hard labels are common: most drafted tokens are accepted for certain
    return logits, labels


def formula(logits, labels, reject_weight):
    """H6 of the design: the sum over positions and the sum of weights, written with
    probabilities.
    """
    probs = 1 / (1 + torch.exp(-logits))
    losses = -(labels * torch.log(probs) + reject_weight * (1 - labels) * torch.log(1 - probs))
    return losses.sum(), (labels + reject_weight * (1 - labels)).sum()


def close(a, b):
    torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_loss_is_the_formula(batch, weight):
    for actual, expected in zip(weighted_bce(*batch, weight), formula(*batch, weight), strict=True):
        close(actual, expected)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_its_gradient_is_that_of_the_formula(batch, weight):
    gradients = []
    for loss in (weighted_bce, formula):
        logits = batch[0].clone().requires_grad_()
        total, weights = loss(logits, batch[1], weight)
        (total / weights).backward()
        gradients.append(logits.grad)
    close(*gradients)
    probs = torch.sigmoid(batch[0])
    labels = batch[1]
    total = (labels + weight * (1 - labels)).sum()
    close(gradients[0], (weight * (1 - labels) * probs - labels * (1 - probs)) / total)


def test_second_derivatives_agree_with_finite_differences(batch):
    logits = batch[0].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: weighted_bce(x, batch[1], 3.0)[0], (logits,))


def test_equal_weights_of_one_give_pytorchs_binary_cross_entropy(batch):
    total, weight = weighted_bce(*batch)
    assert weight == 40
    close(total / weight, binary_cross_entropy_with_logits(*batch))


def test_the_best_constant_is_the_weighted_share_of_acceptances(batch):
    labels = batch[1]
    accept = (1.0 * labels).sum()
    reject = (6.0 * (1 - labels)).sum()
    logit = torch.logit(accept / (accept + reject)).requires_grad_()
    weighted_bce(logit.expand(40), labels, 6.0)[0].backward()
    close(logit.grad, torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("cut", [1, 17, 39])
def test_the_sums_of_two_parts_combine_to_the_loss_of_the_whole(batch, cut):
    logits, labels = batch
    parts = [
        weighted_bce(logits[part], labels[part], 6.0)
        for part in (slice(None, cut), slice(cut, None))
    ]
    total, weight = weighted_bce(logits, labels, 6.0)
    close((parts[0][0] + parts[1][0]) / (parts[0][1] + parts[1][1]), total / weight)
    # which the mean of the parts' own losses is not
    assert abs(sum(t / w for t, w in parts) / 2 - total / weight) > 1e-4


def test_gradients_averaged_over_two_processes_are_those_of_the_whole_batch(batch):
    whole = batch[0].clone().requires_grad_()
    total, weight = weighted_bce(whole, batch[1], 6.0)
    (total / weight).backward()
    parts = batch[0].clone().requires_grad_()
    halves = [
        weighted_bce(parts[part], batch[1][part], 6.0)
        for part in (slice(None, 13), slice(13, None))
    ]
    shared = (
        halves[0][1] + halves[1][1]
    ) / 2  # the global sum over the number of processes, as in HeadModule
    (sum(total / shared for total, _ in halves) / 2).backward()
    close(parts.grad, whole.grad)


def test_extreme_logits_stay_finite_and_cost_their_size():
    logits = torch.tensor([1e4, -1e4, 1e4, -1e4], requires_grad=True)
    total, weight = weighted_bce(logits, torch.tensor([1.0, 0.0, 0.0, 1.0]), 2.0)
    assert (total.item(), weight.item()) == (2e4 + 1e4, 6)
    total.backward()
    assert logits.grad.tolist() == [0, 0, 2, -1]


def test_a_bank_weights_each_heads_loss_by_its_own_weights(batch):
    logits, labels = batch
    specs = [
        HeadSpec(f"h{i}", HeadConfig(hidden_size=4, depth=0), weight)
        for i, weight in enumerate(WEIGHTS)
    ]
    rows = torch.stack([logits + i for i in range(len(specs))])
    sums, totals = HeadBank(specs, seed=0).losses(rows, labels)
    for i, weight in enumerate(WEIGHTS):
        expected = formula(logits + i, labels, weight)
        close(sums[i], expected[0])
        close(totals[i], expected[1])
