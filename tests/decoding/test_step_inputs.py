import pytest
import torch

from specheads.decoding.step_inputs import DraftMemory, HostNumbers

CPU = torch.device("cpu")


def filled(most=3, vocab=4):
    memory = DraftMemory(most, vocab, torch.float64, CPU)
    memory.set_last(9)
    for index in range(most):
        memory.write(
            memory.indices[index],
            torch.tensor([index + 1]),
            torch.full((1, vocab), index + 0.5).double(),
        )
    return memory


def test_a_chain_shows_what_was_written():
    memory = filled()
    assert memory.read_from(0, 3)[0].tolist() == [[9, 1, 2]] and memory.drafted(1).tolist() == [[2]]
    assert memory.probs[0, :3, 0].tolist() == [0.5, 1.5, 2.5]
    start = memory.read_from(0, 3)[0]
    memory.write(memory.indices[0], torch.tensor([3]), torch.zeros(1, 4).double())
    assert start.tolist() == [[9, 3, 2]]


def test_another_memory_takes_a_chain():
    memory = filled()
    other = DraftMemory(3, 4, torch.float64, CPU)
    other.copy_(memory, 2)
    assert other.sequence[0, 1:4].tolist() == [1, 2, 0] and other.probs[0, :, 0].tolist() == [
        0.5,
        1.5,
        0,
    ]


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
