"""Heads in a bank: what each learns, whatever the others are."""

import pytest
import torch

from specheads.heads.head import HeadConfig
from specheads.training.heads.bank import HeadBank, HeadSpec
from specheads.training.heads.head_loss import weighted_bce

SIZE = 6
VOCAB = 12
NUM_STATES = 4000


def spec(name="head", reject_weight=1.0, **kwargs):
    return HeadSpec(name, HeadConfig(SIZE, **{"depth": 1, "width": 8} | kwargs), reject_weight)


@pytest.fixture(scope="module")
def drafted():
    """Draft and target distributions that a state decides, a sampled token for each state, and
    whether it is accepted.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = normal(NUM_STATES, SIZE)
    draft_logits = hidden @ normal(SIZE, VOCAB)
    change = hidden[:, :1] * normal(1, VOCAB)
    draft = draft_logits.softmax(-1)
    target = (draft_logits + 2 * change).softmax(-1)
    token = torch.multinomial(draft, 1, generator=generator)
    accepted = (target / draft).clamp_max(1).gather(1, token).squeeze(1)
    features = {
        "hidden": hidden,
        "embedding": normal(VOCAB, SIZE)[token.squeeze(1)],
        "draft_prob": draft.gather(1, token).squeeze(1),
        "max_prob": draft.amax(1),
        "entropy": torch.special.entr(draft).sum(1),
    }
    return features, accepted


def trained(specs, features, label, steps):
    bank = HeadBank(specs, seed=5).double()
    bank.standardise(features)
    optimizer = torch.optim.AdamW(bank.parameters(), lr=3e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        losses, weights = bank.losses(bank(features), label)
        (losses / weights).sum().backward()
        bank.clip_gradients(1.0)
        optimizer.step()
    return bank


def test_heads_are_learned_to_the_same_weights_together_as_alone(drafted):
    features, label = drafted
    together = [
        spec("one"),
        spec("deep", depth=3, reject_weight=6.0),
        spec("plain", inputs=("hidden", "max_prob")),
    ]
    bank = trained(together, features, label, 5)
    assert len(bank.stacks) == 3 and bank(features).shape == (3, NUM_STATES)
    for each in together:
        alone = trained([each], features, label, 5).heads[each.name]
        for name, value in bank.heads[each.name].state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=1e-10)


def test_a_banks_logits_are_those_of_its_heads(drafted):
    features, label = drafted
    bank = trained(
        [spec("one"), spec("plain", inputs=("hidden",)), spec("two", depth=0)], features, label, 3
    )
    expected = torch.stack([head(features) for head in bank.heads.values()])
    torch.testing.assert_close(bank(features), expected, rtol=0, atol=1e-12)


def test_each_head_has_its_weight_of_rejections():
    label = torch.tensor([0.5, 0.25])
    logits = torch.tensor([[0.3, -0.2]]).repeat(2, 1)
    losses, weights = HeadBank([spec("six", 6.0), spec("plain")], seed=0).losses(logits, label)
    expected = [weighted_bce(logits[0], label, weight) for weight in (6.0, 1.0)]
    torch.testing.assert_close(torch.stack([losses, weights]), torch.tensor(expected).T)
