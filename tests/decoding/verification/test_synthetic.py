import pytest
import torch
from fakes import tiny_pair
from statistics_helper import chi_square_p_value

from specheads import SpeculativeDecoder
from specheads.decoding.stopping import FixedLength
from specheads.decoding.verification import Block, SyntheticVerification
from specheads.errors import UserError


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.8, 1.0])
def test_tokens_are_accepted_at_the_rate(rate):
    """Acceptances up to and with the first rejection are independent trials; false alarm 1e-6."""
    rule = SyntheticVerification(rate)
    random = torch.Generator().manual_seed(0)
    distributions = torch.full((4000, 6, 3), 1 / 3)
    lengths = torch.randint(1, 6, (4000,), generator=random)
    tokens = torch.zeros(4000, 5, dtype=torch.long)
    uniforms = torch.rand(2, 4000, generator=random, dtype=torch.float64)
    block = Block.of(tokens, distributions[:, :-1], distributions, lengths)
    num_accepted, _ = rule.distribution(block).decide(*uniforms)
    assert (num_accepted <= lengths).all()
    accepted = int(num_accepted.sum())
    rejected = int((num_accepted < lengths).sum())
    if rate in (0, 1):
        assert (accepted, rejected) == ((0, 4000) if rate == 0 else (int(lengths.sum()), 0))
    else:
        assert (
            chi_square_p_value(torch.tensor([accepted, rejected]), torch.tensor([rate, 1 - rate]))
            > 1e-6
        )


def test_it_decodes_and_says_what_it_is():
    rule = SyntheticVerification(0.8)
    decoder = SpeculativeDecoder(tiny_pair(), stopping=FixedLength(4), verification=rule)
    stats = decoder.generate([0, 1], 50).stats
    assert stats.num_tokens == 50
    assert 0 < stats.num_accepted < stats.num_drafted
    assert not rule.lossless
    assert "synthetic" in rule.label and "0.8" in rule.label


@pytest.mark.parametrize("rate", [-0.1, 1.5, "high", float("nan")])
def test_an_impossible_rate_is_refused(rate):
    with pytest.raises(UserError, match="verification.rate"):
        SyntheticVerification(rate)
