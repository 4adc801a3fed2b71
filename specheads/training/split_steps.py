"""Training steps that do not fit into memory: their batches are worked on in parts, with the same gradients."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import lightning as L
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specheads.errors import is_out_of_memory

logger = logging.getLogger(__name__)

Part = TypeVar("Part")
Result = TypeVar("Result")


class SplitStepsModule(L.LightningModule):
    """A module whose batches are worked on in more parts each time that memory does not suffice.

    The activations of a part are dropped once its losses are known, and computed again for its gradients. So a step needs the
    memory of one part, and its gradients are those of the whole batch, up to the rounding of sums. Only where one process trains:
    others would wait for the one that begins a step again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_parts = 1
        self._batches: list[tuple[Any, int]] = []  # of this optimizer step so far

    def batch_loss(self, batch: Any, batch_index: int) -> Tensor:
        """Return the loss of a batch of training, with the help of `parts` and `of_part`."""
        raise NotImplementedError

    def num_texts(self, batch: Any) -> int:
        """Return into how many parts a batch can be split."""
        raise NotImplementedError

    def parts(self, rows: Sequence[Part]) -> list[Sequence[Part]]:
        """Return consecutive rows of a batch in `num_parts` parts; fewer if there are fewer rows."""
        count = min(self.num_parts, len(rows))
        bounds = [len(rows) * number // count for number in range(count + 1)]
        return [rows[start:end] for start, end in itertools.pairwise(bounds)]

    def of_part(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Call with a part of a batch; if it is one of several, its activations are not kept until its gradients are computed."""
        return checkpoint(call, *arguments, use_reentrant=False) if self.num_parts > 1 else call(*arguments)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        del self._batches[batch_index % self.trainer.accumulate_grad_batches :]
        self._batches.append((batch, batch_index))
        while True:
            try:
                return self.batch_loss(batch, batch_index)
            except (RuntimeError, MemoryError) as error:
                self._check_splittable(error)
            self._split()

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        """Compute gradients; where memory does not suffice, those of all batches of this step so far, in smaller parts."""
        try:
            return super().backward(loss, *arguments, **options)
        except (RuntimeError, MemoryError) as error:
            self._check_splittable(error)
        loss.detach_()  # the caller has this tensor still, and with it the activations of the whole batch
        while True:
            self._split()
            self.zero_grad()
            try:
                return self._step_again()
            except (RuntimeError, MemoryError) as error:
                self._check_splittable(error)

    def _step_again(self) -> None:
        for batch, batch_index in self._batches:
            loss = self.batch_loss(batch, batch_index) / self.trainer.accumulate_grad_batches
            super().backward(self.trainer.precision_plugin.pre_backward(loss, self))

    def _check_splittable(self, error: BaseException) -> None:
        """Raise the error unless smaller parts could help."""
        most = max(self.num_texts(batch) for batch, _ in self._batches)
        if self.trainer.world_size > 1 or self.num_parts >= most or not is_out_of_memory(error):
            raise error

    def _split(self) -> None:
        self.num_parts *= 2
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning(
            "training: a batch does not fit into memory. From here on batches are worked on in %d parts, with the same gradients "
            "up to rounding; activations are computed twice, so that smaller batches with trainer.accumulate_grad_batches=%d "
            "are faster next time.",
            self.num_parts,
            self.num_parts * self.trainer.accumulate_grad_batches,
        )
