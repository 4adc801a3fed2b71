"""A target that leaves its device during training and comes back for validation."""

from types import SimpleNamespace

import pytest
import torch

from specheads.training.distill.placement import TargetPlace


class Target:
    """Notes where it is moved, and whether autograd could use its weights there."""

    device = torch.device("meta")

    def __init__(self):
        self.moves = []

    def to(self, device):
        self.moves.append((str(device), torch.is_inference_mode_enabled()))


def test_it_comes_back_even_if_training_fails():
    target = Target()

    def train():
        with TargetPlace(target, leaves=True) as place:
            place.leave()
            with torch.inference_mode():
                place.come_back()
                place.leave()
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert target.moves == [("cpu", False), ("meta", False), ("cpu", False), ("meta", False)]


def test_it_stays_where_it_is_unless_it_leaves():
    target = Target()
    with TargetPlace(target, leaves=False) as place:
        place.leave()
        place.come_back()
    assert target.moves == []


def test_a_real_module_keeps_its_numbers():
    target = torch.nn.Linear(2, 2)
    weight = target.weight.detach().clone()
    place = TargetPlace(SimpleNamespace(device=torch.device("cpu"), to=target.to), leaves=True)
    with torch.inference_mode():
        place.leave()
        place.come_back()
    assert torch.equal(target.weight, weight) and not target.weight.is_inference()
