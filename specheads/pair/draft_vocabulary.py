"""A draft with an output over some of the tokens (FR-Spec, Zhao et al. 2025), in memory and in its
folder.

In a folder it is as EAGLE-3's: `d2t` makes a token of a row's number, by addition; without
embeddings it takes the target's.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.errors import UserError
from specheads.pair.quantization import fits_lattice, lattice_from, lattice_of
from specheads.pair.revisions import file_of

KEPT = "kept_tokens"  # a model's buffer: (V_kept,) long, ascending, the tokens of its output's rows
# tensors in a folder
OFFSETS = "d2t"
OUTPUT = "lm_head.weight"
# keys of config.json; weights in 8 bits have a form
SIZE = "draft_vocab_size"
FORM = "stored_form"
# Of a weight in 8 bits, in place of its tensor: (O, I) uint8, and (O, I / 32) float16
_BYTES = ".q"
_STEPS = ".d"
BORROWS = "borrows_embedding"  # an attribute of a model
_WEIGHTS = "model.safetensors"


def kept_tokens(model: nn.Module) -> Tensor | None:
    """Return the tokens (V_kept,) long of a model's output, ascending; None: all."""
    return getattr(model, KEPT, None)


@torch.no_grad()
def keep_tokens(model: PreTrainedModel, tokens: Tensor) -> None:
    """Reduce a draft's output to the rows of some tokens (n,) long.

    Raises UserError if it lacks some or has no plain weights.
    """
    output = model.get_output_embeddings()
    if type(output) is not nn.Linear or output.bias is not None:
        raise UserError(
            f"the output of {type(model).__name__} is a {type(output).__name__}, of which no rows"
            " can be taken."
        )
    tokens = tokens.to(output.weight.device).unique()
    before = kept_tokens(model)
    rows = (
        tokens if before is None else torch.searchsorted(before, tokens).clamp_max(len(before) - 1)
    )
    found = rows < len(output.weight) if before is None else before[rows] == tokens
    if not found.all():
        missing = tokens[~found].tolist()
        raise UserError(
            f"the draft has no logits for {len(missing)} of the tokens to keep, for example"
            f" {missing[0]}."
        )
    set_output(model, output.weight[rows].clone(), tokens)


def set_output(model: PreTrainedModel, weight: Tensor, tokens: Tensor) -> None:
    """Give a model an output over `tokens` (n,) long, ascending, with the rows `weight` (n, H)."""
    with torch.device("meta"):
        output = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    output.weight = nn.Parameter(weight, requires_grad=False)
    model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    model.set_output_embeddings(output)
    setattr(model.config, SIZE, len(tokens))
    model.register_buffer(KEPT, tokens, persistent=False)


def set_stored_output(
    model: PreTrainedModel, weight: Tensor, offsets: Tensor, location: str | Path
) -> None:
    """Give a model the output of its folder: rows `weight` (n, H), of which number i is of token i
    + `offsets[i]`.

    Raises UserError if they do not fit each other or the model.
    """
    offsets = offsets.long()
    tokens, order = (offsets + torch.arange(len(offsets))).sort()
    embedding = model.get_input_embeddings()
    fits = (
        len(tokens) == len(weight) == len(tokens.unique())
        and tokens[0] >= 0
        and tokens[-1] < len(embedding.weight)
    )
    if not fits or weight.shape[1:] != embedding.weight.shape[1:]:
        raise UserError(
            f"{location}: {OUTPUT} {tuple(weight.shape)} and {OFFSETS} {tuple(offsets.shape)} do"
            f" not fit; expected a row for each of {len(offsets)} different tokens from 0 to"
            f" {len(embedding.weight) - 1}."
        )
    set_output(model, weight[order].to(embedding.weight), tokens.to(embedding.weight.device))


class _Checkpoint:
    """The tensors of a model's folder or hub id, one by one.

    None where they are not in one safetensors file.
    """

    def __init__(self, location: str | Path, revision: str | None) -> None:
        path = file_of(location, _WEIGHTS, revision)
        self._file = None if path is None else safe_open(path, "pt")
        self.names = frozenset(() if self._file is None else self._file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self.names or name + _BYTES in self.names

    def __getitem__(self, name: str) -> Tensor:
        assert self._file is not None
        if name in self.names:
            return self._file.get_tensor(name)
        return lattice_from(
            self._file.get_tensor(name + _BYTES), self._file.get_tensor(name + _STEPS)
        ).weight()


@torch.no_grad()
def restore(model: PreTrainedModel, location: str | Path, revision: str | None) -> None:
    """Give a model the kept tokens and weights in 8 bits of its folder.

    Raises UserError if they are missing or do not fit.
    """
    stored = _Checkpoint(location, revision)
    size = getattr(model.config, SIZE, None)
    weights = model.state_dict()
    for name in (each.removesuffix(_BYTES) for each in stored.names if each.endswith(_BYTES)):
        if name != OUTPUT or size is None:
            weights[name].copy_(stored[name])
    if size is None:
        return
    if missing := [name for name in (OUTPUT, OFFSETS) if name not in stored]:
        raise UserError(
            f"{location} has {SIZE}={size} in its config, but no {' and '.join(sorted(missing))} in"
            f" {_WEIGHTS}; such a draft is stored as specheads distill, EAGLE-3 and speculators do."
        )
    set_stored_output(model, stored[OUTPUT], stored[OFFSETS], location)
    setattr(model, BORROWS, _embedding_name(model) not in stored)


def stored_as(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    form: str | None = None,
) -> dict[str, Tensor]:
    """Return `weights` of a draft in the form of its folder: in `dtype`, linear maps in 8 bits
    with the form Q8_0, and kept tokens.
    """
    kept = kept_tokens(model)
    stored = {name: weight.to(dtype) for name, weight in weights.items()}
    if (borrowed := borrowed_weight(model)) is not None:
        stored.pop(borrowed, None)
    for name in [name for name in stored if form is not None and fits_lattice(weights[name])]:
        lattice = lattice_of(weights[name], str(form))
        stored |= {name + _BYTES: lattice.q.flatten(-2), name + _STEPS: lattice.d.squeeze(-1)}
        del stored[name]
    if kept is not None:
        stored[OFFSETS] = (kept - torch.arange(len(kept), device=kept.device)).cpu()
    return stored


def borrows_embedding(draft: nn.Module) -> bool:
    """Whether a draft's input embeddings are its target's: they are not trained, and not stored
    with it.
    """
    return getattr(draft, BORROWS, False)


def borrowed_weight(draft: PreTrainedModel) -> str | None:
    """Return the name of the weight that a draft borrows of its target; None: it borrows none."""
    return _embedding_name(draft) if borrows_embedding(draft) else None


def _embedding_name(model: PreTrainedModel) -> str:
    embedding = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)


def check_embedding(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Raise UserError if the input embeddings of a draft and of its target are of different
    sizes.
    """
    mine = draft.get_input_embeddings()
    theirs = target.get_input_embeddings()
    if theirs.weight.shape != mine.weight.shape:
        raise UserError(
            "the draft uses its target's input embeddings, but those are"
            f" {tuple(theirs.weight.shape)}, and it needs {tuple(mine.weight.shape)}; use the"
            " target that it was distilled for, or distil it with embedding=own."
        )


def borrow_embedding(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    location: str | Path = "",
    revision: str | None = None,
) -> None:
    """Give a draft the target's input embeddings, in the same memory where type and device are the
    same.

    A target without weights has them at its `location`. Raises UserError for embeddings of another
    size, or unreadable ones.
    """
    check_embedding(draft, target)
    weight = target.get_input_embeddings().weight
    if weight.is_meta:
        stored = _Checkpoint(location, revision)
        name = _embedding_name(target)
        if name not in stored.names:
            raise UserError(
                f"the draft uses its target's input embeddings, but {location} has no {name} in"
                f" {_WEIGHTS}."
            )
        weight = stored[name]
    share_embedding(draft, weight)


def share_embedding(draft: PreTrainedModel, weight: Tensor) -> None:
    """Give a draft the input embeddings of its target, in the same memory where type and device are
    the same.
    """
    embedding = draft.get_input_embeddings()
    shared = weight.detach().to(embedding.weight)
    embedding.weight = nn.Parameter(shared, requires_grad=False)
    setattr(draft, BORROWS, True)
