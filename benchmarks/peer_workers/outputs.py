"""Drafts with an output over some tokens, for engines that need one over all."""

import torch
from torch import nn
from transformers import PreTrainedModel

from specheads.pair.draft_vocabulary import KEPT, SIZE, kept_tokens

NEVER = -1e9  # a logit of probability zero


@torch.no_grad()
def complete_output(draft: PreTrainedModel) -> None:
    """Give a draft with an output over some tokens one over all, with a bias against the others."""
    kept = kept_tokens(draft)
    rows = draft.get_output_embeddings().weight
    if kept is None:
        return
    size, hidden_size = draft.get_input_embeddings().weight.shape
    output = nn.Linear(hidden_size, size).requires_grad_(False)
    output.weight.data = rows.new_zeros(size, hidden_size).index_copy(0, kept, rows)
    output.bias.data = rows.new_full((size,), NEVER).index_fill(0, kept, 0)
    draft.set_output_embeddings(output)
    setattr(draft, KEPT, None)
    setattr(draft.config, SIZE, None)
