"""The reading of prompts into an engine's memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specheads.decoding.engine import Engine, ForwardOutput
from specheads.decoding.step_inputs import RowsStep

LONG = 256  # tokens: longer prompts are read alone, because steps in rows compute the attention of each token by itself
TOGETHER = 512  # tokens of several prompts that are read at once, so that activations stay in a CPU's cache


class _LastStates:
    """The epilogue of a forward pass over prompts: the states at some tokens."""

    compile_key = ("states of some tokens",)
    open_inputs = ((0,),)

    def __call__(self, output: ForwardOutput, last: Tensor) -> Tensor:
        """Return the states (n, H) at the tokens of index `last` (n,)."""
        return output.hidden[last, 0]


class PromptReader:
    """Reads prompts into one engine's memory: short ones together, where the engine has rows and is fast at that."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._step = engine, RowsStep(engine, _LastStates())

    def warm_up(self) -> None:
        """Prepare the engine."""
        if self.continues:
            self._step.warm_up(lambda example: (example.zeros(example.num_rows),))

    @property
    def continues(self) -> bool:
        """Whether texts need not begin at the start of their rows."""
        return self._engine.num_rows > 1 and self._engine.reads_rows_together

    def read(self, rows: Sequence[int], texts: Sequence[Sequence[int]], starts: Sequence[int] | None = None) -> list[Tensor]:
        """Read texts of at least one token into rows of the memory; return the states (1, H) at their ends.

        Args:
            starts: positions of the first tokens, up to which rows have been read; None: all are 0. Others need `continues`.
        """
        if self._engine.num_rows == 1:
            device = self._engine.lm.device
            return [self._engine.forward(torch.tensor([text], device=device), num_logits=0).hidden[:, -1] for text in texts]
        states: dict[int, Tensor] = {}
        group: list[int] = []
        starts = starts or [0] * len(rows)
        for number, (text, start) in enumerate(zip(texts, starts, strict=True)):
            if not self.continues or (len(text) > LONG and not start):
                tokens = torch.tensor([text], device=self._engine.lm.device)
                states[number] = self._engine.read_row(rows[number], tokens)[:, -1]
                continue
            if group and sum(len(texts[each]) for each in group) + len(text) > TOGETHER:
                states |= self._read_together(group, rows, texts, starts)
                group = []
            group.append(number)
        if group:
            states |= self._read_together(group, rows, texts, starts)
        return [states[number] for number in range(len(texts))]

    def _read_together(
        self, group: Sequence[int], rows: Sequence[int], texts: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> dict[int, Tensor]:
        """Read the texts of these numbers in one step; return the states at their ends by number."""
        chosen, begins = [texts[number] for number in group], [starts[number] for number in group]
        flat = self._step.flat([rows[number] for number in group], chosen, begins)
        states = self._step(flat, [flat.last])
        # A copy, because an engine may overwrite a step's outputs in the next one.
        return {number: state[None].clone() for number, state in zip(group, states, strict=False)}
