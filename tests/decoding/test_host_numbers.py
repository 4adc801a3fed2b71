import pytest
import torch

from specheads.decoding.host_numbers import HostNumbers

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_the_tensor_shows_the_numbers_that_were_sent(device):
    numbers = HostNumbers((2, 3), torch.device(device))
    assert numbers.tensor.tolist() == [[0, 0, 0], [0, 0, 0]]
    tensor = numbers.tensor
    for last in (7, 2**40):
        numbers.numbers[1] = 1, 2, last
        numbers.send()
        assert tensor is numbers.tensor and tensor.device.type == device
        assert tensor.tolist() == [[0, 0, 0], [1, 2, last]]
