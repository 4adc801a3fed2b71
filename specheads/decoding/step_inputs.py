"""The tensors in which requests' tokens and numbers go to steps, and in which drafts lie between
them.

A step over several rows reads their tokens one after another, without padding between them.
Compiled steps take no sizes of one; what they lack is filled up in a spare row of memory, the last
one.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.engine import Engine, ForwardOutput, RowPlaces, StepMemory
from specheads.decoding.engine.eager import Epilogue

# Tokens: longer prompts are read alone, because steps over rows compute the attention of each token
# by itself
LONG = 256
# Tokens of several prompts that are read at once, so that activations stay in a CPU's cache
TOGETHER = 512

State = TypeVar("State")


class JoinedTokens(NamedTuple):
    """The tokens of several rows, one after another."""

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


class JoinedStep:
    """A step over tokens of several rows of an engine's memory; see `Engine.rows_step`."""

    def __init__(self, engine: Engine, epilogue: Epilogue) -> None:
        self._engine = engine
        self._step = engine.rows_step(epilogue)

    def warm_up(
        self,
        inputs: Callable[["ExampleSizes"], tuple[object, ...]],
        others: Sequence[Tensor] = (),
        most_columns: int = 0,
    ) -> None:
        """Prepare the engine for the epilogue's `inputs` of examples.

        For the others see ExampleSizes.
        """
        examples = []
        for many in (False, True):
            sizes = ExampleSizes(self._engine, others, many, most_columns)
            count = sizes.num_tokens
            places = RowPlaces(sizes.zeros(count), sizes.zeros(count))
            examples.append((sizes.zeros(count, 1), 1, places, *inputs(sizes)))
        self._engine.warm_up_rows(self._step, examples)

    def join(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> JoinedTokens:
        """Return `tokens` of `rows` that begin at positions `starts`, and zeros in the spare row up
        to what the engine needs.
        """
        # Lists, because arrays of a few numbers each would take a twentieth of a small model's
        # step.
        engine = self._engine
        row_of_each: list[int] = []
        positions: list[int] = []
        counts = []
        end = 0
        for row, some, start in zip(rows, tokens, starts, strict=True):
            count = len(some)
            counts.append(count)
            row_of_each += [row] * count
            positions += range(start, start + count)
            end = max(end, start + count)
        num_tokens = len(positions)
        padding = [0] * (engine.padded_rows(num_tokens) - num_tokens)
        spare = [engine.num_rows - 1] * len(padding)
        joined = np.array(
            [
                [*chain.from_iterable(tokens), *padding],
                [*row_of_each, *spare],
                [*positions, *padding],
            ]
        )
        on_device = torch.from_numpy(joined).to(engine.lm.device)
        first = list(accumulate(counts[:-1], initial=0))
        return JoinedTokens(
            tokens=on_device[0, :, None],
            end=end,
            places=RowPlaces(on_device[1], on_device[2]),
            rows=np.array(rows),
            first=np.array(first),
            counts=np.array(counts),
        )

    def __call__(self, joined: JoinedTokens, columns: Sequence[np.ndarray], *others: object) -> Any:
        """Run the step on `columns` (n, ...) of numbers and other inputs.

        Results have rows for what fills `joined` up, too.
        """
        least = self._engine.padded_rows(len(joined.rows))
        spare = self._engine.num_rows - 1
        device = self._engine.lm.device
        inputs = []
        for column in columns:
            filled = _filled(column, least, spare if column is joined.rows else 0)
            inputs.append(torch.from_numpy(filled).to(device))
        return self._step(joined.tokens, joined.end, joined.places, *inputs, *others)


def _filled(numbers: np.ndarray, least: int, value: int) -> np.ndarray:
    """Return numbers (n, ...) with rows of `value` added up to `least` rows."""
    if len(numbers) >= least:
        return numbers
    more = np.empty((least, *numbers.shape[1:]), dtype=numbers.dtype)
    more[: len(numbers)] = numbers
    more[len(numbers) :] = value
    return more


class ExampleSizes:
    """Sizes of arguments to prepare steps with that occur nowhere else: compilers take a size for a
    constant that it equals.
    """

    def __init__(
        self, engine: Engine, others: Sequence[Tensor], many: bool, most_columns: int
    ) -> None:
        """Choose sizes.

        `others` are tensors of constant ones, and the step's index has up to `most_columns`
        columns.
        """
        self._device = engine.lm.device
        self._known = set[int]()
        for tensor in (*engine.lm.model.parameters(), *engine.lm.model.buffers(), *others):
            self._known.update(tensor.shape)
        for config in engine.lm.layer_configs:
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
                self._known.add(getattr(config, name, None) or 0)
        columns = range(min(most_columns, 11), 2, -1)
        self.num_columns = self._free(columns) if most_columns else 0
        self.num_rows = self._free(range(5, 24))
        self.num_tokens = self._free(range(101, 300) if many else range(32, 8, -1))

    def _free(self, sizes: Iterable[int]) -> int:
        """Return the first of some sizes that is free, and occupy it and its neighbours."""
        for size in sizes:
            if size not in self._known:
                self._known.update((size - 1, size, size + 1))
                return size
        raise RuntimeError(f"no size is free, {sorted(self._known)} are taken")

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=self._device)


class CarriedStates(StepMemory):
    """The states that a draft reads next to its tokens, in the memory of its engine: those of the
    positions that its target has read, which steps of the target write there.
    """

    states: Tensor

    def __init__(self, draft_engine: Engine) -> None:
        super().__init__()
        self.register_buffer("states", draft_engine.carried_states)
        draft: Any = draft_engine.lm.model
        self._draft = (draft,)  # not a part: its weights do not change from step to step
        self.compile_key = (self, draft)

    def write(self, output: ForwardOutput) -> None:
        """Write the states of the tokens that a target's forward pass has read.

        Positions that the draft does not reach share its last one, which it never reads.
        """
        (draft,) = self._draft
        assert output.layer_inputs is not None and output.places is not None
        states = draft.first_states(output.layer_inputs.to(draft.fc.weight.dtype))
        rows, positions = output.places
        positions = positions.clamp_max(self.states.shape[1] - 1)
        self.states[rows, positions] = states.flatten(0, 1)


class _ReadPrompts:
    """The epilogue of a forward pass over prompts: the states at some tokens."""

    open_inputs = ((0,),)

    def __init__(self, carried: CarriedStates | None) -> None:
        self.carried = carried
        key = () if carried is None else carried.compile_key
        self.compile_key = ("states of some tokens", *key)

    def __call__(self, output: ForwardOutput, last: Tensor) -> Tensor:
        """Return the states (n, H) at the tokens of index `last` (n,)."""
        if self.carried is not None:
            self.carried.write(output)
        return output.hidden[last, 0]


class PromptReader:
    """Reads prompts into one engine's memory: short ones together, where the engine has rows and is
    fast at that.

    `carried`: what a target writes for its draft.
    """

    def __init__(self, engine: Engine, carried: CarriedStates | None = None) -> None:
        self._engine = engine
        self._carried = carried
        self._step = JoinedStep(engine, _ReadPrompts(carried))

    def warm_up(self) -> None:
        if self._together:
            self._step.warm_up(lambda sizes: (sizes.zeros(sizes.num_rows),))

    @property
    def _together(self) -> bool:
        return self._engine.num_rows > 1 and self._engine.reads_rows_together

    def read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Read prompts of at least two tokens into rows of the memory, all but the last of the
        tokens that the model reads.

        One that reads carried states reads that, too, though it does not count as read: the state
        after it would take the place of the target's.
        """
        skipped = self._engine.lm.num_skipped
        texts = [prompt[1:] if skipped else prompt[:-1] for prompt in prompts]
        group: list[int] = []  # numbers of texts that are read in one step
        size = 0
        for number, text in enumerate(texts):
            if not self._together or len(text) > LONG:
                tokens = torch.tensor([text], device=self._engine.lm.device)
                output = self._engine.read_row(rows[number], tokens)
                if self._carried is not None:
                    self._carried.write(output)
                if self._engine.num_rows == 1:
                    self._engine.pretend(len(text) - skipped)
                continue
            if size + len(text) > TOGETHER:
                self._read_together(group, rows, texts)
                group = []
                size = 0
            group.append(number)
            size += len(text)
        if group:
            self._read_together(group, rows, texts)

    def _read_together(
        self, numbers: Sequence[int], rows: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> None:
        joined = self._step.join(
            rows=[rows[number] for number in numbers],
            tokens=[texts[number] for number in numbers],
            starts=[0] * len(numbers),
        )
        self._step(joined, [joined.last])


def with_rows(state: State, rows: Tensor | Sequence[int], new: State) -> State:
    """Return a state whose `rows` (n,) are those of `new`."""

    def changed(part: Tensor, of_new: Tensor) -> Tensor:
        index = torch.as_tensor(rows, device=part.device)
        return part.index_put((index,), of_new.to(part.dtype))

    made: State = tree_map(changed, state, new)
    return made


class DraftMemory(StepMemory):
    """Drafted tokens and their distributions of R rows, in the same tensors every round.

    Without `rows`, methods mean one. Where tokens are only compared, the distributions' first
    numbers are kept alone: they are NaN where a model's logits were.
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
        only_compared: bool = False,
    ) -> None:
        """Allocate for `most` tokens, and the committed token that verification reads first."""
        super().__init__()
        self.most = most
        self.vocab_size = vocab_size
        self.only_compared = only_compared
        self.register_buffer(
            "sequence", torch.zeros(num_rows, most + 1, dtype=torch.long, device=device)
        )
        self.register_buffer(
            "probs",
            torch.zeros(
                num_rows, most, 1 if only_compared else vocab_size, dtype=dtype, device=device
            ),
        )
        self._tree_probs: Tensor | None = None
        # On a CPU a number is written through it in a tenth of the time.
        self._numbers = self.sequence.numpy() if device.type == "cpu" else self.sequence
        # Made once: making a view costs as much as a copy.
        self.index = torch.arange(most, device=device)
        self.indices = self.index.split(1)
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def distributions(self, count: int) -> Tensor:
        """Return a tensor for the distributions (count, V) of a growing tree; drafters share it."""
        if self._tree_probs is None or len(self._tree_probs) < count:
            self._tree_probs = self.probs.new_zeros(count, self.vocab_size)
        return self._tree_probs

    def write(
        self, index: Tensor, token: Tensor, probs: Tensor, rows: Tensor | None = None
    ) -> None:
        """Write tokens (B,) and the distributions (B, V) they were sampled from, or the first
        numbers of these (B, 1), at `index` (1,) of rows (B,), or of all rows.
        """
        probs = probs[:, : self.probs.shape[-1]]
        if rows is None:
            self.sequence.index_copy_(1, index + 1, token[:, None])
            self.probs.index_copy_(1, index, probs[:, None])
        else:
            self.sequence[rows, index + 1] = token
            self.probs[rows, index] = probs.to(self.probs.dtype)

    def set_last(self, token: int) -> None:
        """Set the committed token that verification reads first."""
        self._numbers[0, 0] = token

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
