"""One model on a static KV cache: forward, rewind, keep.

Memory is allocated once, at the first forward, for `capacity` positions. A forward pass writes
after the current length and attends to a view of the written part; rewinding only moves the length.
`EagerEngine` runs plain PyTorch: the reference.
"""

import copy
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from specheads.decoding.engine.compiled_program import TensorTree
from specheads.decoding.engine.reading import (
    Memory,
    Reading,
    RowPlaces,
    TreeSlots,
    padded_reading,
    rows_states,
    states_and_inputs,
    tree_reading,
)
from specheads.pair.language_model import LanguageModel

# Tokens that packed copies of weights read at once, so that activations stay in a CPU's cache. The
# model itself, by products and attention of torch, reads 1,000 tokens 1.0 to 1.7 times as fast,
# 4,000 and 8,000 1.3 to 2.2 times.
READ_TOKENS = 256


@dataclass(frozen=True)
class ForwardOutput:
    """The hidden states (B, T, H) at the tap and the logits of the last n positions, for the
    `tokens` (B, T) read.
    """

    tokens: Tensor
    hidden: Tensor
    kept_logits: Tensor  # (B, n, V_kept), of the tokens that the model's output has
    # (B, T, L H), the inputs of the L layers that the engine was asked for, and the places of these
    # B T tokens; None: of none
    layer_inputs: Tensor | None = None
    places: RowPlaces | None = None
    lm: LanguageModel | None = None  # None: its output has all tokens

    @property
    def logits(self) -> Tensor:
        """The logits (B, n, V) of all tokens."""
        return self.kept_logits if self.lm is None else self.lm.spread(self.kept_logits)


class Epilogue(Protocol):
    """A function that follows a forward pass in the same compiled step.

    It takes and returns tensors, and tuples of them, and may hold modules.
    """

    @property
    def compile_key(self) -> Hashable:
        """Epilogues with equal keys compute the same, so an engine compiles one of them."""

    # One with a true attribute `updates_last_input` returns the new value of its last input, which
    # its caller passes to the next call in place of the old one; an engine may then overwrite the
    # old one. That of a step in rows has `open_inputs`: for each of its first inputs, a tuple of
    # the dimensions whose sizes change
    # from call to call.

    # With both `*` and `**` a type checker accepts every list of inputs.
    def __call__(
        self, output: ForwardOutput, /, *inputs: TensorTree, **named: TensorTree
    ) -> TensorTree: ...


class StepMemory(nn.Module):
    """The base of modules whose buffers steps write: an epilogue is bound to them as to weights,
    but their numbers may change.
    """


CompiledStep = Callable[..., TensorTree]


class _KVLayer(CacheLayerMixin):
    """One attention layer's static keys and values (B, heads, capacity, head size), with a length
    that can move back.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.keys = key_states.new_empty(
            (*key_states.shape[:2], self.capacity, key_states.shape[-1])
        )
        self.values = value_states.new_empty(
            (*value_states.shape[:2], self.capacity, value_states.shape[-1])
        )
        self.is_initialized = True

    @property
    def start(self) -> Tensor:
        """The position, () long, at which the next forward pass writes."""
        return torch.tensor(self.length)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write after the current length and return views of everything up to there."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def carried(self, like: Tensor) -> Tensor:
        """Return the states (B, T, H) at the next T places, of which `like` has the shape."""
        if not self.is_initialized:
            states = like[:, None]
            self.lazy_initialization(states, states[..., :0])
        return self.keys[:, 0, self.length : self.length + like.shape[1]]

    def carry(self, states: Tensor) -> None:
        """Write the last of the states (B, T, H) of the tokens at these places after them."""
        self.keys[:, 0, self.length + states.shape[1]] = states[:, -1]

    def row(self, row: int, length: int) -> "_KVLayer":
        """Return the memory of one row with `length` positions, which shares this one's tensors."""
        other = copy.copy(self)
        other.length = length
        if self.is_initialized:
            other.keys = self.keys[row : row + 1]
            other.values = self.values[row : row + 1]
        return other

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity


def _slice_of(rows: Tensor) -> slice | None:
    """Return the slice that takes `rows` (N,), or None if they do not follow each other.

    On a CPU, where asking costs no wait.
    """
    first = int(rows[0])
    return (
        slice(first, first + len(rows))
        if torch.equal(rows, torch.arange(first, first + len(rows)))
        else None
    )


class EagerEngine:
    """The reference engine, and the interface of all: no compilation, exact lengths.

    With B > 1 rows that `forward` reads are left-padded and share one length; `rows_step` reads
    rows of any lengths.
    """

    num_prepared = 0  # steps compiled or captured so far; generation adds none after the warm-up

    def __init__(
        self,
        lm: LanguageModel,
        capacity: int,
        spare_capacity: int = 0,
        num_rows: int = 1,
        layers: Sequence[int] = (),
    ) -> None:
        """Allocate for `num_rows` texts of `capacity` positions, and `spare_capacity` after them
        for trees.

        `layers`: those whose inputs a ForwardOutput has.
        """
        self.lm = lm
        self.layers = tuple(layers)
        self.num_rows = num_rows
        self.placement = lm.placement
        self.process = os.getpid()
        self.capacity = capacity
        self._reach = capacity + spare_capacity
        self._layers = [_KVLayer(self._reach) for _ in range(lm.cache_layers)]
        self.cache = Cache(layers=self._layers)
        if num_rows > 1 or lm.explicit_masks or lm.reads_layers:
            self._allocate()

    @torch.no_grad()
    def _allocate(self) -> None:
        """Allocate and zero the memory, which `forward` would do."""
        tokens = torch.zeros((self.num_rows, 1), dtype=torch.long, device=self.lm.device)
        self.forward(tokens, num_logits=0, lm=self.lm)
        self.pretend(0)
        self._zero()

    @property
    def length(self) -> int:
        """The number of positions in memory."""
        return self._layers[0].length

    @property
    def reader(self) -> LanguageModel:
        """The model as forward passes run it that are not compiled."""
        return self.lm

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        tree_slots: TreeSlots | None = None,
        num_logits: int = 1,
        attention_mask: Tensor | None = None,
        lm: LanguageModel | None = None,
    ) -> ForwardOutput:
        """Append `tokens` (B, T) long to the memory and run the model over them.

        Args:
            positions: (B, T) long; default: the next ones.
            tree_slots: the tree that these tokens are nodes of, after those already in memory;
                decides positions. Default: causal.
            num_logits: compute logits for that many of the last positions.
            attention_mask: (B, length + T), 0 at padding; for left-padded rows.
            lm: the model as it reads; default: `reader`.
        """
        lm = self.reader if lm is None else lm
        start = self.length
        end = self.length + tokens.shape[1]
        self._check_fits(end)
        if positions is None:
            positions = torch.arange(start, end, device=tokens.device)[None].expand_as(tokens)
        if tree_slots is not None:
            reading = tree_reading(lm, tree_slots, start, tokens.shape[1])
        elif lm.explicit_masks:
            reading = padded_reading(lm, positions, start, attention_mask)
        else:
            reading = Reading({"position_ids": positions, "attention_mask": attention_mask})
        hidden, inputs = states_and_inputs(
            lm, self.layers, lambda: reading.hidden_states(lm, tokens, self.cache)
        )
        self.pretend(end)  # also of a layer that the model skips, which has a length, but no memory
        logits = lm.kept_logits(hidden[:, hidden.shape[1] - num_logits :])
        places = None if inputs is None else text_places(0, positions)
        return ForwardOutput(tokens, hidden, logits, inputs, places, lm)

    def _reader_of(self, count: int) -> LanguageModel:
        """Return the model as it reads so many tokens of a prompt fastest."""
        return self.reader if count <= READ_TOKENS else self.lm

    def compiled_step(self, epilogue: Epilogue, all_logits: bool = False) -> CompiledStep:
        """Return a function of `(tokens, *inputs)`: a forward pass over `tokens` (1, T) and then
        `epilogue(output, *inputs)`.

        Its result is valid until it runs again, and every call must pass inputs of the same shapes.
        With `all_logits` the epilogue gets the logits of every token instead of the last one's.
        """

        def run(tokens: Tensor, *inputs: TensorTree) -> TensorTree:
            return epilogue(
                self.forward(tokens, num_logits=tokens.shape[1] if all_logits else 1), *inputs
            )

        return run

    def repeat(
        self,
        step: CompiledStep,
        tokens: Tensor,
        columns: Sequence[Tensor],
        *inputs: TensorTree,
        least: int = 1,
    ) -> tuple[int, TensorTree]:
        """Run a compiled step over one of `tokens` (1, n) after another until its result begins
        with a true number.

        A step gets a number of each of the `columns` (n,), and then the `inputs`, the last of which
        is the result of the step before; it may write the next token. At least `least` steps are
        run. Returns how many were run, and the last one's result.
        """
        (*others, result) = inputs
        count = 0
        for token, *numbers in zip(
            tokens.split(1, dim=1), *(column.split(1) for column in columns), strict=True
        ):
            result = step(token, *numbers, *others, result)
            count += 1
            if result[0].item() and count >= least:
                break
        return count, result

    def rows_step(self, epilogue: Epilogue) -> CompiledStep:
        """Return a function of `(tokens, end, places, *inputs)`: a forward pass over `tokens` (N,
        1) and then the epilogue.

        The epilogue gets the logits of every token. `end` is an integer above all positions. The
        caller keeps the lengths of rows; the engine's `length` has no meaning for them.
        """

        @torch.no_grad()
        def run(tokens: Tensor, end: int, places: RowPlaces, *inputs: TensorTree) -> TensorTree:
            # A token of each of all rows: what it attends to lies in memory as attention wants it.
            chosen = _slice_of(places.rows) if places.rows.device.type == "cpu" else None
            hidden, of_layers = states_and_inputs(
                self.lm,
                self.layers,
                lambda: rows_states(self.lm, self._keys_and_values(), tokens, places, end, chosen),
            )
            logits = self.lm.kept_logits(hidden)
            output = ForwardOutput(tokens, hidden, logits, of_layers, places, self.lm)
            return epilogue(output, *inputs)

        return run

    def warm_up(
        self, compiled_step: CompiledStep, counts: Sequence[int], *inputs: TensorTree
    ) -> None:
        """Prepare a compiled step for `counts` of tokens at any length, with inputs like these.

        Empties the memory.
        """
        self.rewind(0)

    def warm_up_rows(
        self, compiled_step: CompiledStep, examples: Sequence[tuple[TensorTree, ...]]
    ) -> None:
        """Prepare a step in rows for arguments like these `examples`; empties the memory.

        A compiler takes a size for a constant that equals one; see `ExampleSizes`.
        """

    def padded(self, count: int) -> int:
        """Return the number of tokens, at least `count`, to which a forward pass over `count`
        tokens should be padded.
        """
        return count

    def padded_rows(self, count: int) -> int:
        """Return to which length, at least `count`, the inputs of a `rows_step` of length `count`
        should be filled up.
        """
        return count

    @torch.no_grad()
    def read_row(
        self, row: int, tokens: Tensor, length: int = 0, reading: Reading | None = None
    ) -> ForwardOutput:
        """Read `tokens` (1, T) into the memory of one row, after `length` positions, without
        logits.

        `reading`: how; default: one after the other. The engine's own length stays.
        """
        self._check_fits(length + tokens.shape[1])
        if not self._written():
            self._allocate()
        lm = self._reader_of(tokens.shape[1]) if reading is None else self.reader
        positions = length + torch.arange(tokens.shape[1], device=tokens.device)[None]
        plain = (
            padded_reading(lm, positions, length)
            if lm.explicit_masks
            else Reading({"position_ids": positions})
        )
        cache = Cache(layers=[layer.row(row, length) for layer in self._layers])
        hidden, inputs = states_and_inputs(
            lm, self.layers, lambda: (reading or plain).hidden_states(lm, tokens, cache)
        )
        places = None if inputs is None else text_places(row, positions)
        return ForwardOutput(tokens, hidden, hidden[:, :0], inputs, places)

    @property
    def reads_rows_together(self) -> bool:
        """Whether steps in rows are the faster way to read short prompts."""
        return False

    def clear_row(self, row: int) -> None:
        """Zero one row's memory: a NaN would spread even from masked positions."""
        for memory in self._key_value_tensors():
            memory[row].zero_()

    def _check_fits(self, end: int) -> None:
        if end > self._reach:
            raise RuntimeError(f"{end} positions do not fit into the KV cache for {self._reach}")

    def rewind(self, length: int) -> None:
        """Forget every position from `length` on."""
        if not 0 <= length <= self.length:
            raise RuntimeError(f"cannot rewind from {self.length} to {length} positions")
        self.pretend(length)

    def pretend(self, length: int) -> None:
        """Let memory count as holding `length` positions, whatever they are."""
        for layer in self._layers:
            layer.length = length

    def keep(self, base: int, accepted_nodes: Sequence[int]) -> None:
        """Forget the nodes written from position `base` on, except for those in the slots
        `accepted_nodes`, in that order.
        """
        count = len(accepted_nodes)
        # Those before it are in place already
        stay = next((i for i, node in enumerate(accepted_nodes) if i != node), count)
        if stay < count:
            moved = torch.tensor(accepted_nodes[stay:], device=self.lm.device) + base
            for memory in self._key_value_tensors():
                kept = memory[..., moved.to(memory.device), :]
                memory[..., base + stay : base + count, :] = kept
        self.rewind(base + count)

    def _key_value_tensors(self) -> list[Tensor]:
        """Return the tensors (..., capacity, head size) that memory consists of."""
        tensors = list[Tensor]()
        for layer in self._written():
            tensors += [layer.keys, layer.values]
        return tensors

    def _zero(self) -> None:
        for memory in self._key_value_tensors():
            memory.zero_()

    @property
    def carried_states(self) -> Tensor:
        """The states (R, capacity, H) by position that a draft reads next to its tokens."""
        return self._layers[-1].keys[:, 0]

    @property
    def memory_bytes(self) -> int:
        """The bytes of the KV cache, of all rows; 0 before it is allocated."""
        return sum(memory.nbytes for memory in self._key_value_tensors())

    def _keys_and_values(self) -> Memory:
        """Return the keys and values of each layer, empty ones for a layer that the model skips."""
        nothing = torch.zeros(0, device=self.lm.device)
        memory = Memory()
        for layer in self._layers:
            memory.append(
                (layer.keys, layer.values) if layer.is_initialized else (nothing, nothing)
            )
        return memory

    def _written(self) -> list[_KVLayer]:
        """Return the layers that have memory; layers that the model skips have none."""
        return [layer for layer in self._layers if layer.is_initialized]

    def fork(
        self, rows: Tensor, lengths: Tensor, spare_capacity: int
    ) -> tuple["EagerEngine", Tensor]:
        """Return an engine whose row b continues the first `lengths[b]` >= 1 positions of row
        `rows[b]`, and its mask.

        This engine's rows begin in its first position. The other's are left-padded to the longest,
        as the mask (B, W) shows; `spare_capacity` more positions fit after them. The KV cache
        is copied, not computed again.
        """
        width = int(lengths.max())
        index = torch.arange(width, device=lengths.device) - (width - lengths)[:, None]
        other = EagerEngine(self.lm, width + spare_capacity)
        other.pretend(width)
        for source, copied in zip(self._layers, other._layers, strict=True):
            if not source.is_initialized:
                continue
            row = rows.to(source.keys.device)[:, None]
            place = index.clamp_min(0).to(source.keys.device)
            copied.lazy_initialization(
                source.keys[:1].expand(len(rows), -1, -1, -1),
                source.values[:1].expand(len(rows), -1, -1, -1),
            )
            copied.keys[:, :, :width] = source.keys[row, :, place].transpose(1, 2)
            copied.values[:, :, :width] = source.values[row, :, place].transpose(1, 2)
        return other, (index >= 0).long()


def text_places(row: int, positions: Tensor) -> RowPlaces:
    """Return the places of tokens at `positions` (1, T) of one row."""
    return RowPlaces(torch.full_like(positions[0], row), positions[0])


Engine = EagerEngine  # the others extend it


class Engines(tuple[Engine, ...]):
    """The engines of a decoder: the target's, and the draft's if one is run."""

    @property
    def target(self) -> Engine:
        return self[0]

    @property
    def draft(self) -> Engine:
        """The engine of the draft; the target's where no draft is run."""
        return self[-1]
