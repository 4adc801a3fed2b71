"""Numbers that the host sets and a device reads."""

import torch


class HostNumbers:
    """A small tensor of whole numbers that the host fills: in place where the device is the CPU, otherwise with one copy.

    Set numbers only after the device has read earlier ones: on a GPU, copies wait in its queue.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        host = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.numbers = host.numpy()  # setting one of its numbers takes a tenth of the time of setting a tensor's
        self._host, self.tensor = host, host if device.type == "cpu" else host.to(device)

    def send(self) -> None:
        """Make the tensor show the numbers."""
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)
