"""Forward passes over trees of tokens and over tokens of several texts: the position and the
attention of each token.

In a tree, positions follow depth, so that a node is read like the last token of its path. In rows,
a token is a row of the batch, with its place in memory: all are written before any of them attends,
so tokens of one text may be read together, without padding.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specheads.heads.head import scoring_with
from specheads.heads.portable.network import Network
from specheads.pair.language_model import LanguageModel
from specheads.pair.sampling import Sampling, computing_with

# Keys and values (R, heads, capacity, head size) of each layer
Memory = list[tuple[Tensor, Tensor]]

# What an attention function of transformers returns: the output (B, T, heads, D), and weights if it
# has them
Attention = Callable[..., tuple[Tensor, Tensor | None]]
# Held while something of a model, or of transformers, is another for all threads
_SHARED = threading.RLock()
# Options that only transformers' attention has
_OTHER_ATTENTION = "dropout", "is_causal", "position_bias", "softcap", "cache"


class TreeSlots(NamedTuple):
    """The last `W` slots of a memory, which hold a tree or will; slot 0 is its root."""

    base: int  # the position of the root
    depth: Tensor  # (W,) long, of each slot, 0 for the root
    seen: Tensor  # (W, W) bool, row i: the slots that slot i attends to, itself included


class RowPlaces(NamedTuple):
    """Where tokens are: their rows of the memory and their positions, (N,) long each."""

    rows: Tensor
    positions: Tensor


class Reading(NamedTuple):
    """How a model reads tokens: arguments of its forward pass, and the positions (S,) long of keys
    if ALiBi may need them.
    """

    arguments: dict[str, object]
    key_position: Tensor | None = None

    def hidden_states(self, lm: LanguageModel, tokens: Tensor, memory: Cache) -> Tensor:
        """Return the hidden states (B, T, H) of `tokens` (B, T), whose keys and values are written
        to memory.
        """
        with _alibi_at(lm, self.key_position, tokens.shape[0]):
            return lm.hidden_states(
                tokens, past_key_values=memory, use_cache=True, **self.arguments
            )


def states_and_inputs(
    lm: LanguageModel, layers: Sequence[int], read: Callable[[], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Return the states that `read` returns of a forward pass, and the inputs (B, T, L H) of L
    layers in it; None if there are none.
    """
    if not layers:
        return read(), None
    with lm.noting_inputs(layers) as inputs:
        hidden = read()
    # Those of a model that is spread are on the devices of its layers.
    return hidden, torch.cat([inputs[layer].to(hidden.device) for layer in layers], dim=-1)


def tree_reading(lm: LanguageModel, tree_slots: TreeSlots, start: int, count: int) -> Reading:
    """Return how `count` tokens from position `start` on are read as nodes of a tree, which begins
    at `tree_slots.base`.
    """
    base, depth, seen = tree_slots
    nodes = slice(start - base, start - base + count)
    slots = start - base + count
    before = torch.arange(base, device=depth.device)
    in_tree = seen[nodes, :slots]
    in_sight = torch.cat([in_tree.new_ones(count, base), in_tree], dim=1)
    # ALiBi's distances are differences of depth.
    return _masked(
        lm, base + depth[None, nodes], in_sight[None], torch.cat([before, base + depth[:slots]])
    )


def branches_reading(
    lm: LanguageModel, length: int, branch: Tensor, prefix: Tensor, depth: Tensor, count: int
) -> Reading:
    """Return how the last `count` of W tokens are read, which come after a text of `length` tokens
    and branch off from it.

    `branch`, `prefix`, `depth`: (W,) long, of each token: the number of its branch, how many of the
    text's tokens come before the branch, and how many of the branch's.
    """
    before = torch.arange(length, device=branch.device)
    positions = prefix + depth
    reads = slice(len(branch) - count, None)
    in_branch = (branch == branch[reads, None]) & (depth <= depth[reads, None])
    seen = torch.cat([before < prefix[reads, None], in_branch], dim=1)
    return _masked(lm, positions[None, reads], seen[None], torch.cat([before, positions]))


def padded_reading(
    lm: LanguageModel, positions: Tensor, start: int, padding: Tensor | None = None
) -> Reading:
    """Return how tokens at `positions` (B, T) long are read, which are written from place `start`
    of memory on.

    `padding`: (B, start + T), 0 at padding, as models take it; here it becomes part of a mask of
    four dimensions.
    """
    end = start + positions.shape[1]
    key_place = torch.arange(end, device=positions.device)
    place = key_place[None, start:]
    seen = key_place <= place[..., None]
    if padding is not None:
        seen = seen & (padding > 0)[:, None]
    reading = _masked(lm, place, seen, key_place)
    return reading._replace(
        arguments=reading.arguments | {"position_ids": positions.clamp_max(lm.window - 1)}
    )


def chain_reading(lm: LanguageModel, start: Tensor, count: int, size: int) -> Reading:
    """Return how `count` tokens from position `start`, () long, are read that follow each other.

    See `tree_reading`.
    """
    # Padding at the end of the window shares the last position.
    positions = (start + torch.arange(count, device=start.device))[None]
    key_position = torch.arange(size, device=start.device)
    return _masked(lm, positions, key_position <= positions[..., None], key_position)


@contextmanager
def _alibi_at(lm: LanguageModel, key_position: Tensor | None, num_rows: int) -> Iterator[None]:
    """Let a model with ALiBi compute it for keys at `key_position` (S,) long.

    It makes it from masks of two dimensions (B, S).
    """
    base_model = lm.model.base_model
    if key_position is None or not hasattr(base_model, "build_alibi_tensor"):
        yield
        return
    ones = torch.ones(num_rows, key_position.shape[0], dtype=torch.long, device=key_position.device)
    with _SHARED:
        make = base_model.build_alibi_tensor
        base_model.build_alibi_tensor = lambda mask, num_heads, dtype: make(ones, num_heads, dtype)[
            :, :, key_position
        ]
        try:
            yield
        finally:
            del base_model.build_alibi_tensor


def _masked(lm: LanguageModel, positions: Tensor, seen: Tensor, key_position: Tensor) -> Reading:
    """Return how tokens at `positions` (B, T) long are read that see keys as in `seen` (B, T, S).

    A mask has the form that a model takes, and there is one for each kind of its layers.
    """

    def formed(seen: Tensor) -> Tensor:
        if lm.config._attn_implementation == "sdpa":
            return seen[:, None]
        dtype = lm.output_embedding.weight.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
            ~seen, torch.finfo(dtype).min
        )[:, None]

    masks: Tensor | dict[str, Tensor]
    window = getattr(lm.config, "sliding_window", None)
    kinds = getattr(lm.config, "layer_types", None)
    if window is None or (kinds and "sliding_attention" not in kinds):
        masks = formed(seen)
    else:
        near = seen & (key_position > positions[..., None] - window)
        # Without kinds, the window slides over every layer, as in Mistral.
        masks = (
            {"full_attention": formed(seen), "sliding_attention": formed(near)}
            if kinds
            else formed(near)
        )
    return Reading(
        {"position_ids": positions.clamp_max(lm.window - 1), "attention_mask": masks}, key_position
    )


class _StepLayer(CacheLayerMixin):
    """One attention layer's memory inside a step, read as far as `size`.

    Subclasses write into it.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, size: int) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.size = size
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The memory is there from the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.size, 0

    def get_max_length(self) -> int:
        return self.keys.shape[2]


class RowsLayer(_StepLayer):
    """The memory of tokens at their places in rows."""

    def __init__(
        self, keys: Tensor, values: Tensor, size: int, places: RowPlaces, chosen: slice | None
    ) -> None:
        """`chosen`: the rows whose keys and values attention gets; None: each token's, copied."""
        super().__init__(keys, values, size)
        self.places = places
        self.chosen = chosen

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (N, heads, 1, head size), and return those that attention gets."""
        rows, positions = self.places
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        keys = self.keys[:, :, : self.size]
        values = self.values[:, :, : self.size]
        return (
            (keys[rows], values[rows])
            if self.chosen is None
            else (keys[self.chosen], values[self.chosen])
        )

    def get_seq_length(self) -> int:
        return 0

    def carried(self, like: Tensor) -> Tensor:
        """Return the states (N, 1, H) at the tokens' places."""
        return self.keys[self.places.rows, 0, self.places.positions][:, None]

    def carry(self, states: Tensor) -> None:
        """Write the states (N, 1, H) of each row's last token after its place.

        The places between tokens of one row keep theirs: a step may run twice.
        """
        rows, positions = self.places
        is_last = nn.functional.pad(rows[1:] != rows[:-1], (0, 1), value=True)
        before = self.keys[rows, 0, positions + 1]
        self.keys[rows, 0, positions + 1] = torch.where(is_last[:, None], states[:, 0], before)


def rows_states(
    lm: LanguageModel,
    memory: Memory,
    tokens: Tensor,
    places: RowPlaces,
    size: int,
    chosen: slice | None,
) -> Tensor:
    """Read `tokens` (N, 1) at `places` with `size` positions of memory; return states (N, 1, H).

    `chosen`: see RowsLayer.
    """
    cache = Cache(layers=[RowsLayer(keys, values, size, places, chosen) for keys, values in memory])
    key_position = torch.arange(size, device=places.rows.device)
    positions = places.positions[:, None]
    return _masked(lm, positions, (key_position <= positions)[:, None], key_position).hidden_states(
        lm, tokens, cache
    )


class ChainLayer(_StepLayer):
    """The memory of one text, written at `start`, () long."""

    def __init__(self, keys: Tensor, values: Tensor, size: int, start: Tensor) -> None:
        super().__init__(keys, values, size)
        self.start = start

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write at `start` and return views as far as `size`.

        Positions beyond the text are masked.
        """
        places = self.start + torch.arange(key_states.shape[2], device=key_states.device)
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys[:, :, : self.size], self.values[:, :, : self.size]

    def get_seq_length(self) -> Tensor:
        return self.start

    def carried(self, like: Tensor) -> Tensor:
        """Return the states (1, T, H) at the places of the T tokens of `like` (1, T, H)."""
        places = self.start + torch.arange(like.shape[1], device=like.device)
        return self.keys[:, 0].index_select(1, places)

    def carry(self, states: Tensor) -> None:
        """Write the last of the tokens' states (1, T, H) after their places."""
        place = self.start + states.shape[1]
        self.keys.index_copy_(2, place[None], states[:, None, -1:])


def _has_other_options(options: Mapping[str, object]) -> bool:
    """Whether attention is called with options that only transformers' attention has."""
    given = map(options.get, _OTHER_ATTENTION)
    return any(isinstance(value, Tensor) or value for value in given)


class Operations(Sampling):
    """The operations of a step. These are torch's, and transformers' attention; an engine
    for a device may have other operations of the same results.
    """

    # Those of a step's tokens, where attention is given keys and values of all rows of a memory
    places: RowPlaces | None = None

    def head_logits(self, network: Network, inputs: Tensor) -> Tensor:
        """Return the logits (...) of a head's network for assembled inputs (..., input_size)."""
        return network.score(inputs)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
    ) -> Tensor | None:
        """Return the attention (B, T, heads, D) of `query` (B, heads, T, D) under a mask; None:
        transformers' attention `sdpa` computes it.
        """
        return None


class AttentionOfLibrary:
    """The entry `sdpa` of the table in which transformers' models find their attention: it computes
    with the operations of its thread, if there are any, and otherwise as before.
    """

    def __init__(self) -> None:
        self.plain: Attention | None = None  # what the table held before

    def install(self) -> None:
        """Take the entry, for good, where another has it."""
        with _SHARED:
            current = ALL_ATTENTION_FUNCTIONS["sdpa"]
            if current != self.attention:
                self.plain = current
                ALL_ATTENTION_FUNCTIONS["sdpa"] = self.attention

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output (B, T, heads, D) of attention, and its weights if it has them."""
        assert self.plain is not None
        operations = _operations.get()
        if operations is None:
            return self.plain(module, query, key, value, attention_mask, **options)
        if attention_mask is not None and not _has_other_options(options):
            scale = options.get("scaling")
            attended = operations.attend(query, key, value, attention_mask, scale)
            if attended is not None:
                return attended, None
        if operations.places is not None:
            rows = operations.places.rows
            key, value = key[rows], value[rows]
        return self.plain(module, query, key, value, attention_mask, **options)


_operations: ContextVar[Operations | None] = ContextVar("operations", default=None)
_library = AttentionOfLibrary()


@contextmanager
def computing(operations: Operations) -> Iterator[None]:
    """While it is active, this thread's forward passes, heads and warps compute with `operations`.

    For code that is traced or captured.
    """
    _library.install()
    before = _operations.set(operations)
    try:
        with computing_with(operations), scoring_with(operations.head_logits):
            yield
    finally:
        _operations.reset(before)
