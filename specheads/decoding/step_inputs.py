"""The tensors in which rows' tokens and numbers go to steps, and in which drafts lie between them.

A step reads the tokens of all rows one after another, without padding between them. Compiled steps
take no sizes of one; what they lack is filled up in a spare row of memory, the last one.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, repeat
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.engine import Engine, ForwardOutput, RowPlaces, StepMemory

# Tokens: longer prompts are read alone, because steps in rows compute the attention of each token
# by itself
LONG = 256
# Tokens of several prompts that are read at once, so that activations stay in a CPU's cache
TOGETHER = 512


class _FlatTokens(NamedTuple):
    """The tokens of several rows, as a step reads them."""

    tokens: Tensor  # (N, 1) long
    end: int  # above all positions
    places: RowPlaces
    rows: np.ndarray  # (n,)
    first: np.ndarray  # (n,), the index of each row's first token
    counts: np.ndarray  # (n,), its number of tokens

    @property
    def last(self) -> np.ndarray:
        """(n,), the index of each row's last token."""
        return self.first + self.counts - 1


class RowsStep:
    """A step over tokens of several rows of an engine's memory; see `Engine.rows_step`."""

    def __init__(self, engine: Engine, epilogue: Any) -> None:
        self._engine = engine
        self._step = engine.rows_step(epilogue)

    def warm_up(
        self,
        inputs: Callable[["RowsExample"], tuple[Any, ...]],
        others: Sequence[Tensor] = (),
        most_columns: int = 0,
    ) -> None:
        """Prepare the engine for the epilogue's `inputs` of an example.

        For the others see RowsExample.
        """
        examples = [RowsExample(self._engine, others, many, most_columns) for many in (False, True)]
        self._engine.warm_up_rows(self._step, [each.arguments(*inputs(each)) for each in examples])

    def flat(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> _FlatTokens:
        """Return `tokens` of `rows` that begin at positions `starts`, and zeros in the spare row up
        to what the engine needs.
        """
        # Lists, because arrays of a few numbers each would take a twentieth of a small model's
        # step.
        engine = self._engine
        counts = [len(each) for each in tokens]
        padding = engine.padded_rows(sum(counts)) - sum(counts)
        ends = list(map(add, starts, counts))
        parts: tuple[Iterable[Iterable[int]], ...] = (
            tokens,
            map(repeat, rows, counts),
            map(range, starts, ends),
        )
        paddings = (0, engine.num_rows - 1, 0)
        flat = np.array(
            [
                [*chain.from_iterable(part), *[value] * padding]
                for part, value in zip(parts, paddings, strict=True)
            ]
        )
        on_device = torch.from_numpy(flat).to(engine.lm.device)
        first = list(accumulate(counts[:-1], initial=0))
        places = RowPlaces(on_device[1], on_device[2])
        return _FlatTokens(
            on_device[0, :, None],
            max(ends),
            places,
            np.array(rows),
            np.array(first),
            np.array(counts),
        )

    def __call__(self, flat: _FlatTokens, columns: Sequence[np.ndarray], *others: Any) -> Any:
        """Run the step on `columns` (n, ...) of numbers and other inputs.

        Results have rows for what fills `flat` up, too.
        """
        least = self._engine.padded_rows(len(flat.rows))
        spare = self._engine.num_rows - 1
        device = self._engine.lm.device
        inputs = [
            torch.from_numpy(_filled(each, least, spare if each is flat.rows else 0)).to(device)
            for each in columns
        ]
        return self._step(flat.tokens, flat.end, flat.places, *inputs, *others)


def _filled(numbers: np.ndarray, least: int, value: int) -> np.ndarray:
    """Return numbers (n, ...) with rows of `value` added up to `least` rows."""
    if len(numbers) >= least:
        return numbers
    more = np.empty((least, *numbers.shape[1:]), dtype=numbers.dtype)
    more[: len(numbers)] = numbers
    more[len(numbers) :] = value
    return more


class RowsExample:
    """Arguments to prepare steps with, in sizes that occur nowhere else: compilers take a size for
    a constant that it equals.
    """

    def __init__(
        self, engine: Engine, others: Sequence[Tensor], many: bool, most_columns: int
    ) -> None:
        """Choose sizes.

        `others` are tensors of constant ones, and the step's index has up to `most_columns`
        columns.
        """
        weights = [*engine.lm.model.parameters(), *engine.lm.model.buffers()]
        known = {size for tensor in (*weights, *others) for size in tensor.shape}
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        known |= {
            getattr(config, name, None) or 0 for config in engine.lm.layer_configs for name in names
        }
        self._device = engine.lm.device

        def free(sizes: Iterable[int]) -> int:
            """Return the first of some sizes that is free, and occupy it and its neighbours."""
            size = next((size for size in sizes if size not in known), None)
            if size is None:
                raise RuntimeError(f"no size is free, {sorted(known)} are taken")
            known.update((size - 1, size, size + 1))
            return size

        self.num_columns = free(range(min(most_columns, 11), 2, -1)) if most_columns else 0
        self.num_rows = free(range(5, 24))
        self.num_tokens = free(range(101, 300) if many else range(32, 8, -1))

    def zeros(self, *shape: int, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def arguments(self, *inputs: Any) -> tuple[Any, ...]:
        places = RowPlaces(self.zeros(self.num_tokens), self.zeros(self.num_tokens))
        return self.zeros(self.num_tokens, 1), 1, places, *inputs


class _LastStates:
    """The epilogue of a forward pass over prompts: the states at some tokens."""

    compile_key = ("states of some tokens",)
    open_inputs = ((0,),)

    def __call__(self, output: ForwardOutput, last: Tensor) -> Tensor:
        """Return the states (n, H) at the tokens of index `last` (n,)."""
        return output.hidden[last, 0]


class PromptReader:
    """Reads prompts into one engine's memory: short ones together, where the engine has rows and is
    fast at that.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._step = RowsStep(engine, _LastStates())

    def warm_up(self) -> None:
        if self._together:
            self._step.warm_up(lambda example: (example.zeros(example.num_rows),))

    @property
    def _together(self) -> bool:
        return self._engine.num_rows > 1 and self._engine.reads_rows_together

    def read(self, rows: Sequence[int], texts: Sequence[Sequence[int]]) -> None:
        """Read texts of at least one token into rows of the memory, from their beginning."""
        groups: list[list[int]] = []  # numbers of texts that are read in one step
        size = TOGETHER
        for number, text in enumerate(texts):
            if not self._together or len(text) > LONG:
                tokens = torch.tensor([text], device=self._engine.lm.device)
                self._engine.read_row(rows[number], tokens)
                if self._engine.num_rows == 1:
                    self._engine.pretend(len(text))
                continue
            size += len(text)
            if size > TOGETHER:
                groups.append([])
                size = len(text)
            groups[-1].append(number)
        for group in groups:
            flat = self._step.flat(
                [rows[number] for number in group],
                [texts[number] for number in group],
                [0] * len(group),
            )
            self._step(flat, [flat.last])


def with_rows(state: Any, rows: Tensor | Sequence[int], new: Any) -> Any:
    """Return a state whose `rows` (n,) are those of `new`."""

    def changed(part: Tensor, of_new: Tensor) -> Tensor:
        return part.index_put((torch.as_tensor(rows, device=part.device),), of_new.to(part.dtype))

    return tree_map(changed, state, new)


class HostNumbers:
    """A small tensor of whole numbers that the host fills: in place where the device is the CPU,
    otherwise with one copy.

    Set numbers only after the device has read earlier ones: on a GPU, copies wait in its queue.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        host = torch.zeros(shape, dtype=torch.long, pin_memory=device.type == "cuda")
        self.numbers = (
            host.numpy()
        )  # setting one of its numbers takes a tenth of the time of setting a tensor's
        self._host = host
        self.tensor = host if device.type == "cpu" else host.to(device)

    def send(self) -> None:
        """Make the tensor show the numbers."""
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)


class DraftMemory(StepMemory):
    """Drafted tokens and their distributions of R rows, in the same tensors every round.

    Without `rows`, methods mean one.
    """

    sequence: Tensor
    probs: Tensor

    def __init__(
        self,
        most: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_rows: int = 1,
    ) -> None:
        """Allocate for `most` tokens, and the committed token that verification reads first."""
        super().__init__()
        self.most = most
        self.register_buffer(
            "sequence", torch.zeros(num_rows, most + 1, dtype=torch.long, device=device)
        )
        self.register_buffer(
            "probs", torch.zeros(num_rows, most, vocab_size, dtype=dtype, device=device)
        )
        self._numbers = self.sequence.numpy() if device.type == "cpu" else None
        self._tree_probs: Tensor | None = None
        # Made once: making a view costs as much as a copy.
        self.index = torch.arange(most, device=device)
        self.indices = self.index.split(1)
        self._inputs = self.sequence[:1].split(1, dim=1)
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def distributions(self, count: int) -> Tensor:
        """Return a tensor for the distributions (count, V) of a growing tree; drafters share it."""
        if self._tree_probs is None or len(self._tree_probs) < count:
            self._tree_probs = self.probs.new_zeros(count, self.probs.shape[-1])
        return self._tree_probs

    def write(
        self, index: Tensor, token: Tensor, probs: Tensor, rows: Tensor | None = None
    ) -> None:
        """Write tokens (B,) and the distributions (B, V) they were sampled from at `index` (1,) of
        rows (B,), or of all rows.
        """
        if rows is None:
            self.sequence.index_copy_(1, index + 1, token[:, None])
            self.probs.index_copy_(1, index, probs[:, None])
        else:
            self.sequence[rows, index + 1] = token
            self.probs[rows, index] = probs.to(self.probs.dtype)

    def set_last(self, token: int) -> None:
        if self._numbers is None:
            self._inputs[0].fill_(token)
        else:
            self._numbers[0, 0] = token

    def drafted(self, index: int) -> Tensor:
        """Return the token (1, 1) at `index`."""
        return self._inputs[index + 1]

    def read_from(self, index: int, count: int) -> tuple[Tensor, Tensor]:
        """Return what steps read to write `count` tokens from `index` on, (1, count), the same one
        place before, and indices.
        """
        if (index, count) not in self._views:
            part = slice(index, index + count)
            self._views[index, count] = self.sequence[:1, part], self.index[part]
        return self._views[index, count]

    def copy_(self, other: "DraftMemory", count: int) -> None:
        """Copy the first `count` tokens of each row of another memory, and their distributions."""
        self.sequence[:, 1 : count + 1] = other.sequence[:, 1 : count + 1]
        self.probs[:, :count] = other.probs[:, :count]
