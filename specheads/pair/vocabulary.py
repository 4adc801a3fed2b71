"""Vocabularies of draft and target: equal, or different at the edge, in added tokens that only one of the two knows.

Such a draft is used over the target's vocabulary: it never proposes a token that it does not know, and reads one as the mean of
those that it knows. So the output's distribution stays the target's, and the target's probability of these tokens is lost to
acceptance.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specheads.errors import UserError

TEXT = "def f(x):\n    return x ** 2  # \u00e9, \u4e2d, 1234"  # to which both tokenizers must give the same ids


def known_tokens(draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, draft_id: str, target_id: str) -> Tensor | None:
    """Return which tokens of the target's vocabulary the draft knows, (V,) bool; None where it knows all.

    Sizes of embeddings do not matter.

    Raises:
        UserError: tokenizers that differ in more than added tokens.
    """
    of_draft, of_target = draft.get_vocab(), target.get_vocab()
    moved = sorted((token for token in of_draft.keys() & of_target.keys() if of_draft[token] != of_target[token]), key=str)
    single = of_draft.keys() ^ of_target.keys()
    added = {token for tokenizer in (draft, target) for token in getattr(tokenizer, "get_added_vocab", dict)()}
    if moved or single - added:
        differing = moved or sorted(single - added, key=str)
        raise _different(draft_id, target_id, f"{len(moved) + len(single - added)} tokens differ, for example {differing[0]!r}")
    ids = [tokenizer(TEXT, add_special_tokens=False)["input_ids"] for tokenizer in (draft, target)]
    if ids[0] != ids[1]:
        raise _different(draft_id, target_id, "the same text gets other ids")
    known = torch.zeros(max(of_target.values()) + 1, dtype=torch.bool)
    known[[place for token, place in of_target.items() if token in of_draft]] = True
    return None if known.all() or not single else known


def _different(draft_id: str, target_id: str, example: str) -> UserError:
    return UserError(
        f"draft {draft_id} and target {target_id} have different tokenizers ({example}); speculative decoding needs a draft with "
        "the target's own tokenizer, which may lack added tokens of it, or have others."
    )


@torch.no_grad()
def fit_to_vocabulary(draft: PreTrainedModel, known: Tensor) -> None:
    """Give a draft in memory rows for all tokens of the target, with the mean of its embeddings for those that it does not know.

    Args:
        known: (V,) bool, of `known_tokens`.

    Raises:
        UserError: a quantized draft, whose embeddings cannot grow.
    """
    if draft.get_input_embeddings().weight.shape[0] < len(known):
        if getattr(draft.config, "quantization_config", None) is not None:
            raise UserError(
                f"the quantized draft has {draft.get_input_embeddings().weight.shape[0]} embeddings, and the target knows "
                f"{len(known)} tokens; use it without quantization."
            )
        draft.resize_token_embeddings(len(known), mean_resizing=False)
        draft.requires_grad_(False)
    weight = draft.get_input_embeddings().weight
    place = known.to(weight.device)
    weight[: len(known)][~place] = weight[: len(known)][place].float().mean(dim=0).to(weight.dtype)
