"""Models that keep more than keys and values, or attend by rules that a static cache does not
know: each text on the cache that the model makes.

Recurrent and convolution states cannot be cut back, so a copy of the cache from before each round
is kept, from which tokens are read again after going back.
"""

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from specheads.decoding.engine.compiled_program import TensorTree
from specheads.decoding.engine.eager import (
    CompiledStep,
    EagerEngine,
    Epilogue,
    ForwardOutput,
    text_places,
)
from specheads.decoding.engine.reading import (
    ChainLayer,
    Reading,
    RowPlaces,
    TreeSlots,
    chain_reading,
    rows_states,
    states_and_inputs,
)
from specheads.errors import UserError, is_out_of_memory
from specheads.pair.language_model import LanguageModel
from specheads.pair.quantization import is_quantized
from specheads.pair.reading import whole_states

MOST_AGAIN = 16  # tokens that a forward pass reads a second time; more are read alone before it

# What models call their caches
_CACHES = "past_key_values", "cache_params", "state", "past_buckets_states"
_KINDS = {"full_attention", "sliding_attention"}  # of layers that static memory knows
# In names of what a config limits attention by
_LENGTHS = re.compile("window|chunk|local_att|index_|compress|mem_len|axial")
_KNOWN_LENGTHS = re.compile("^(use_|max_window_layers|sliding_window$)|sliding_window_pattern")
# Of kinds whose states are the same however many tokens are read at once; sparse attention chooses
# others, once texts are long.
_TOGETHER = _KINDS | {"chunked_attention", "linear_attention", "conv", "hybrid", "moe", "mlp"}
_SPARSE = re.compile("index_|keep_window|compress")
_NUM_CHECKED = 12  # tokens


class CacheChoice(NamedTuple):
    """On which cache a model decodes: why not on a static one (None: on that), and if on its own,
    whether it reads several tokens at once.
    """

    obstacle: str | None
    together: bool = True


_choices: WeakKeyDictionary[nn.Module, CacheChoice] = WeakKeyDictionary()


def cache_of(lm: LanguageModel) -> CacheChoice:
    """Return on which cache a model decodes, after a check of a few tokens.

    Raises UserError for one whose states are right on none.
    """
    if lm.model not in _choices:
        _choices[lm.model] = _checked_cache(lm)
    return _choices[lm.model]


@torch.no_grad()
def _checked_cache(lm: LanguageModel) -> CacheChoice:
    """Check that tokens which are read in parts get the states of one pass."""
    if lm.reads_layers:  # its layer is Llama's or Qwen3's, and its states depend on the target's
        return CacheChoice(None)
    # Their long texts are not those of transformers' generation, however they are read; see
    # tests/decoding/test_architectures.py.
    if getattr(lm.config, "index_topk", None) or lm.config.model_type in ("moshi", "reformer"):
        raise _undecodable(lm)
    obstacle = _obstacle_to_static_memory(lm)
    if obstacle is None and lm.config._attn_implementation not in ("sdpa", "eager"):
        return CacheChoice(None)  # kernels that take no masks raise where they would need them
    tokens = ((torch.arange(_NUM_CHECKED, device=lm.device) * 7919 + 1) % lm.vocab_size)[None]
    expected = lm.hidden_states(tokens, use_cache=False)
    if obstacle is None:
        if _holds(_is_right_statically, lm, tokens, expected):
            return CacheChoice(None)
        obstacle = "on static memory it computes something else"
    sparse = any(_SPARSE.search(name) and value for name, value in lm.config.to_dict().items())
    is_known = set(getattr(lm.config, "layer_types", None) or ()) <= _TOGETHER and not sparse
    for together in (True, False) if is_known else (False,):
        if _holds(_is_right_on_own_cache, lm, tokens, expected, together):
            return CacheChoice(obstacle, together)
    raise _undecodable(lm)


def _undecodable(lm: LanguageModel) -> UserError:
    remedy = "choose a model of another architecture"
    if is_quantized(lm.model):
        remedy = "give the checkpoint without quantization, and model.quantization=int8 or int4"
    return UserError(
        f"{type(lm.model).__name__} cannot be decoded: it computes other states where a text is"
        f" read in parts than where it is read at once; {remedy}."
    )


def _holds(check: Callable[..., bool], *arguments: object) -> bool:
    """Whether a check holds.

    Architectures have many ways to fail at what they were not made for.
    """
    try:
        return check(*arguments)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False


def _obstacle_to_static_memory(lm: LanguageModel) -> str | None:
    """Return what a config says of layers that static memory does not know, or None.

    A check would need long texts to see it.
    """
    config = lm.config
    if type(config).__module__.startswith("transformers_modules."):
        return "its code comes with the checkpoint"
    if other := set(getattr(config, "layer_types", None) or ()) - _KINDS:
        return f"it has layers of the kind {', '.join(sorted(other))}"
    for name, value in config.to_dict().items():
        limits = bool(value) and not isinstance(value, str) and _LENGTHS.search(name)
        if limits and not _KNOWN_LENGTHS.search(name):
            return f"its attention depends on {name}"
    return None


def _is_right(lm: LanguageModel, expected: Tensor, places: Sequence[int], states: Tensor) -> bool:
    """Whether `states` (n, H) are the `expected` ones (1, T, H) at places, up to rounding."""
    expected = expected[0, list(places)].double()
    states = states.double()
    errors = (
        (states - expected).norm(dim=-1) / expected.norm(dim=-1)
    ).nan_to_num()  # a NaN is reported where it is decoded
    # In 16 bits rounding may send single tokens to other experts.
    is_wide = lm.output_embedding.weight.dtype.itemsize > 2
    return bool(errors.max() < 1e-3 if is_wide else errors.median() < 0.05)


def _is_right_statically(lm: LanguageModel, tokens: Tensor, expected: Tensor) -> bool:
    """Whether tokens (1, T) get the expected states (1, T, H) in every way that engines read:
    parts, rows, trees and copies.
    """
    engine = EagerEngine(lm, _NUM_CHECKED + 4)
    device = tokens.device
    states = [engine.forward(tokens[:, :5]).hidden[0]]
    for tensor in engine._key_value_tensors():
        tensor[..., 5:, :] = 0
    engine.rewind(3)
    states.append(engine.forward(tokens[:, 3:6]).hidden[0])
    if len({weight.device for weight in lm.model.parameters()}) > 1:  # no step is compiled then
        return _is_right(lm, expected, [0, 1, 2, 3, 4, 3, 4, 5], torch.cat(states))
    memory = engine._keys_and_values()
    size = engine.capacity
    start = torch.tensor(6, device=device)
    cache = Cache(layers=[ChainLayer(keys, values, size, start) for keys, values in memory])
    states.append(chain_reading(lm, start, 2, size).hidden_states(lm, tokens[:, 6:8], cache)[0])
    places = RowPlaces(
        torch.zeros(2, dtype=torch.long, device=device), torch.arange(8, 10, device=device)
    )
    states.append(rows_states(lm, memory, tokens[0, 8:10, None], places, size, None)[:, 0])
    engine.pretend(9)
    # A root, a token that branches off, and two that continue the text
    seen = torch.eye(4, dtype=torch.bool, device=device)
    seen[:, 0] = True
    seen[3, 2] = True
    tree = TreeSlots(9, torch.tensor([0, 1, 1, 2], device=device), seen)
    states.append(engine.forward(tokens[:, [9, 0, 10, 11]], tree_slots=tree).hidden[0, [0, 2, 3]])
    lengths = torch.tensor([6, 8], device=device)
    other, mask = engine.fork(torch.zeros_like(lengths), lengths, 1)
    mask = nn.functional.pad(mask, (0, 1), value=1)
    states.append(
        other.forward(tokens[0, lengths, None], lengths[:, None], attention_mask=mask).hidden[:, 0]
    )
    return _is_right(
        lm, expected, [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9, 9, 10, 11, 6, 8], torch.cat(states)
    )


def _is_right_on_own_cache(
    lm: LanguageModel, tokens: Tensor, expected: Tensor, together: bool
) -> bool:
    """Whether tokens (1, T) get the expected states (1, T, H) in parts and after going back, to a
    copy and between copies.
    """
    engine = OwnCacheEngine(lm, _NUM_CHECKED, together=together)
    states = [engine.forward(tokens[:, :4]).hidden[0]]
    places = [0, 1, 2, 3]
    for kept in (4, 6, 7):
        for start, end in (
            (engine.length, _NUM_CHECKED - 1),
            (kept, kept + 1),
            (kept + 1, kept + 3),
        ):
            engine.rewind(start)
            states.append(engine.forward(tokens[:, start:end]).hidden[0])
            places += range(start, end)
    return _is_right(lm, expected, places, torch.cat(states))


class OwnCacheEngine(EagerEngine):
    """`engine=eager` for such models, one text after another.

    `together`: whether it reads several tokens at once.
    """

    def __init__(
        self,
        lm: LanguageModel,
        capacity: int,
        num_rows: int = 1,
        together: bool = True,
        layers: Sequence[int] = (),
    ) -> None:
        super().__init__(lm, capacity, layers=layers)
        self.num_rows = num_rows
        self._together = together
        known = inspect.signature(lm.body.forward).parameters
        self._name = next((name for name in _CACHES if name in known), _CACHES[0])
        self._takes_positions = "position_ids" in known
        self._texts = (
            [self]
            if num_rows == 1
            else [OwnCacheEngine(lm, capacity, 1, together, layers) for _ in range(num_rows)]
        )
        self._text = torch.empty(1, 0, dtype=torch.long, device=lm.device)
        # Of the first `_num_read` tokens; None: the copy is to be taken, or there is none
        self._cache: Cache | None = None
        self._num_read = 0
        self._has_cache = True
        self._copy: tuple[int, Cache] | None = None  # the number of tokens read, and the cache then
        self._rewound_to = 0

    @property
    def length(self) -> int:
        return self._text.shape[1]

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, *_: object, num_logits: int = 1, **__: object
    ) -> ForwardOutput:
        self._check_fits(self.length + tokens.shape[1])
        before = self.length
        self._text = torch.cat([self._text, tokens], dim=1)
        states = list[Tensor]()
        of_layers = list[Tensor]()
        for end in self._ends(before):
            hidden, inputs = states_and_inputs(self.lm, self.layers, partial(self._read_to, end))
            states.append(hidden)
            if inputs is not None:
                of_layers.append(inputs)
        count = tokens.shape[1]  # what was read again comes before these
        hidden = torch.cat(states, dim=1)[:, -count:]
        logits = self.lm.kept_logits(hidden[:, count - num_logits :])
        if not of_layers:
            return ForwardOutput(tokens, hidden, logits, lm=self.lm)
        inputs = torch.cat(of_layers, dim=1)[:, -count:]
        positions = torch.arange(before, before + count, device=tokens.device)[None]
        places = text_places(0, positions)
        return ForwardOutput(tokens, hidden, logits, inputs, places, self.lm)

    def _ends(self, before: int) -> list[int]:
        """Return where the forward passes end that read the text, of which `before` tokens were
        there before this call.
        """
        end = self.length
        if not self._together:  # only a pass from the beginning takes several tokens
            first = [] if self._num_read else [before or end]
            return [*first, *range((self._num_read or first[0]) + 1, end + 1)]
        return [before, end] if self._has_cache and before - self._num_read > MOST_AGAIN else [end]

    def _read_to(self, end: int) -> Tensor:
        """Read what is not read of the text's first `end` tokens; return its states (1, T, H)."""
        if self._cache is None and self._copy is not None:
            self._cache = _copy_of(self._copy[1])
        elif self._cache is not None and self._num_read == self._rewound_to:
            self._copy = self._num_read, _copy_of(self._cache)
        given: dict[str, object] = {} if self._cache is None else {self._name: self._cache}
        if self._takes_positions:
            given["position_ids"] = torch.arange(self._num_read, end, device=self.lm.device)[None]
        output = self.lm.body(
            input_ids=self._text[:, self._num_read : end], use_cache=True, **given
        )
        self._cache = output.get(self._name)
        self._has_cache = self._cache is not None
        # A model without a cache reads all of its text each time
        self._num_read = end if self._has_cache else 0
        return output.last_hidden_state.to(self.lm.device)

    def rewind(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise RuntimeError(f"cannot rewind from {self.length} to {length} positions")
        self._text = self._text[:, :length]
        self._rewound_to = length
        if length < self._num_read:
            if self._copy is not None and self._copy[0] > length:
                self._copy = None
            self._cache = None
            self._num_read = 0 if self._copy is None else self._copy[0]
        for text in self._texts if self.num_rows > 1 else ():
            text.rewind(length)

    def rows_step(self, epilogue: Epilogue) -> CompiledStep:
        def run(tokens: Tensor, end: int, places: RowPlaces, *inputs: TensorTree) -> TensorTree:
            rows = places.rows.tolist()
            starts = places.positions.tolist()
            states = []
            of_layers = []
            for row, group in groupby(range(len(rows)), key=rows.__getitem__):
                first, *others = group
                of_row = tokens[first : first + 1 + len(others)].T
                output = self.read_row(row, of_row, starts[first])
                states.append(output.hidden[0])
                if output.layer_inputs is not None:
                    of_layers.append(output.layer_inputs[0])
            hidden = torch.cat(states)[:, None]
            inputs_of_layers = torch.cat(of_layers)[:, None] if of_layers else None
            logits = self.lm.kept_logits(hidden)
            output = ForwardOutput(tokens, hidden, logits, inputs_of_layers, places, self.lm)
            return epilogue(output, *inputs)

        return torch.no_grad()(run)

    def read_row(
        self, row: int, tokens: Tensor, length: int = 0, reading: Reading | None = None
    ) -> ForwardOutput:
        assert reading is None, "there are no branches on a model's own cache"
        text = self._texts[row]
        if length < text.length:
            text.rewind(length)
        output = text.forward(tokens, num_logits=0)
        if output.places is None:
            return output
        return replace(output, places=text_places(row, output.places.positions[None]))

    def clear_row(self, row: int) -> None:
        self._texts[row].rewind(0)

    def pretend(self, length: int) -> None:
        if length > self.length:
            self.forward(self._text.new_zeros(1, length - self.length), num_logits=0)
        self.rewind(length)


def _copy_of(cache: Cache) -> Cache:
    """Return a copy of a cache.

    Keys and values are shared, because layers replace them and never write into them.
    """
    shared = dict[int, object]()
    for layer in getattr(cache, "layers", ()):
        if isinstance(layer, DynamicLayer):
            shared |= {id(layer.keys): layer.keys, id(layer.values): layer.values}
    return copy.deepcopy(cache, shared)


class WholeTexts:
    """What `ReadTexts` needs of an engine, for models on their own cache: each step reads all texts
    from their beginning.
    """

    memory_bytes = 2**62  # as if it were full: as few texts at once as the caller allows

    def __init__(self, lm: LanguageModel, tokens: Tensor) -> None:
        """`tokens`: (B, T) long."""
        self.lm = lm
        self._tokens = tokens.to(lm.device)

    def fork(
        self, rows: Tensor, lengths: Tensor, spare_capacity: int
    ) -> tuple["WholeTexts", Tensor]:
        """Return texts whose row b continues row `rows[b]`, and a mask without meaning."""
        tokens = nn.functional.pad(self._tokens[rows.to(self.lm.device)], (0, spare_capacity))
        return WholeTexts(self.lm, tokens[:, : int(lengths.max()) + spare_capacity]), tokens[:, :0]

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, positions: Tensor, attention_mask: Tensor, num_logits: int = 0
    ) -> ForwardOutput:
        """Write `tokens` (B, 1) at `positions` (B, 1) and read them after those before them, for
        states alone.
        """
        self._tokens.scatter_(1, positions, tokens)
        states = whole_states(self.lm, self._tokens[:, : int(positions.max()) + 1])
        hidden = states[torch.arange(len(states), device=states.device), positions[:, 0]][:, None]
        return ForwardOutput(tokens, hidden, hidden[:, :0])
