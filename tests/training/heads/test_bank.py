"""The two read-outs of heads in a bank: what each learns, from which labels, and that neither changes the other."""

import pytest
import torch

from specheads.heads.head import HeadConfig, load_head, save_head
from specheads.heads.metrics import overlap_metrics
from specheads.training.heads.bank import HeadBank, HeadSpec
from specheads.training.heads.head_loss import weighted_bce

SIZE, VOCAB, NUM_STATES = 6, 12, 4000


def spec(name="head", reject_weight=1.0, **kwargs):
    return HeadSpec(name, HeadConfig(SIZE, **{"overlap": True, "depth": 1, "width": 8} | kwargs), reject_weight)


@pytest.fixture(scope="module")
def drafted():
    """Draft and target distributions that a state decides, a sampled token for each state, and the labels of both read-outs."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = normal(NUM_STATES, SIZE)
    draft_logits, change = hidden @ normal(SIZE, VOCAB), hidden[:, :1] * normal(1, VOCAB)
    draft, target = draft_logits.softmax(-1), (draft_logits + 2 * change).softmax(-1)
    token = torch.multinomial(draft, 1, generator=generator)
    accepted = (target / draft).clamp_max(1).gather(1, token).squeeze(1)
    features = {
        "hidden": hidden,
        "embedding": normal(VOCAB, SIZE)[token.squeeze(1)],
        "draft_prob": draft.gather(1, token).squeeze(1),
        "max_prob": draft.amax(1),
        "entropy": torch.special.entr(draft).sum(1),
    }
    return features, {"sampled": accepted, "overlap": torch.minimum(target, draft).sum(1)}


def trained(specs, features, labels, steps=300):
    bank = HeadBank(specs, seed=5).double()
    bank.standardise(features)
    optimizer = torch.optim.AdamW(bank.parameters(), lr=3e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        losses, weights = bank.losses(bank(features), labels)
        (losses / weights).sum().backward()
        bank.clip_gradients(1.0)
        optimizer.step()
    return bank


@pytest.mark.parametrize("known", [True, False], ids=["overlaps", "samples"])
def test_the_read_out_learns_known_overlaps_from_them_and_from_sampled_acceptances(drafted, known):
    """A sampled acceptance is the overlap on average, so it is an unbiased label where the overlap was not stored."""
    features, labels = drafted
    given = labels if known else labels | {"overlap": torch.full_like(labels["overlap"], torch.nan)}
    before, after = (
        overlap_metrics(trained([spec()], features, given, steps)(features)[1].detach(), labels["overlap"]) for steps in (0, 300)
    )
    assert before["correlation"] < 0.5 and before["kl"] > 0.1
    assert after["correlation"] > (0.9 if known else 0.85)
    assert after["kl"] < 0.03


def test_the_acceptance_is_learned_to_the_same_weights_with_and_without_the_other_read_out(drafted):
    features, labels = drafted
    together = [spec("both"), spec("deep", depth=3, reject_weight=6.0), spec("plain", overlap=False)]
    bank = trained(together, features, labels, 5)
    assert [read_out.name for read_out in bank.read_outs] == ["both/", "deep/", "plain/", "both/overlap_", "deep/overlap_"]
    assert len(bank.stacks) == 2 and bank(features).shape == (5, NUM_STATES)
    for each in together:
        alone = trained([each], features, labels, 5).heads[each.name]
        for name, value in bank.heads[each.name].state_dict().items():
            torch.testing.assert_close(value, alone.state_dict()[name], rtol=0, atol=1e-10)
    for name, value in bank.heads["plain"].state_dict().items():
        torch.testing.assert_close(value, bank.heads["both"].state_dict()[name], rtol=0, atol=1e-10)


def test_a_banks_logits_are_those_of_its_heads(drafted):
    features, labels = drafted
    bank = trained([spec("one"), spec("plain", overlap=False), spec("two", depth=0)], features, labels, 3)
    one, plain, two = bank.heads.values()
    expected = torch.stack(
        [one(features), plain(features), two(features), one.overlap_logit(features), two.overlap_logit(features)]
    )
    torch.testing.assert_close(bank(features), expected, rtol=0, atol=1e-12)


def test_each_read_out_has_its_label_and_the_weights_of_its_head():
    """Of the second token the overlap is not known, so the acceptance of the drafted token stands for it."""
    labels = {"sampled": torch.tensor([0.5, 0.25]), "overlap": torch.tensor([0.75, torch.nan])}
    logits = torch.tensor([[0.3, -0.2]]).repeat(4, 1)
    losses, weights = HeadBank([spec("six", 6.0), spec("plain")], seed=0).losses(logits, labels)
    learned = [labels["sampled"], torch.tensor([0.75, 0.25])]
    expected = [weighted_bce(logits[0], label, weight) for label in learned for weight in (6.0, 1.0)]
    torch.testing.assert_close(torch.stack([losses, weights]), torch.tensor(expected).T)


def test_a_head_is_saved_whose_read_outs_read_the_same_inputs(tmp_path):
    """Their networks are in one stack, and share the scale of its inputs."""
    head = HeadBank([spec(inputs=("hidden",))], seed=0).heads["head"]
    assert head.input_mean.data_ptr() == head.overlap.input_mean.data_ptr()
    assert load_head(save_head(head, tmp_path / "head")).config.overlap
