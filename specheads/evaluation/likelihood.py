"""The likelihood of responses under a model, as it is: temperature, top-k and top-p are left out."""

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import cross_entropy

from specheads.language_model import LanguageModel
from specheads.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, right_padded, slices
from specheads.sampling import check_no_nan


@torch.no_grad()
def response_nats(lm: LanguageModel, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[float]:
    """Return the negative log-likelihood of each response to a prompt, in nats; equal responses have equal ones."""
    known: dict[tuple[int, ...], float] = {}
    different = list(dict.fromkeys(map(tuple, responses)))
    texts = [[*prompt, *response] for response in different]
    for batch in batches_of_tokens([len(text) for text in texts], BATCH_TOKENS):
        # The last token is read by nobody.
        hidden = lm.hidden_states(right_padded([texts[row][:-1] for row in batch]).to(lm.device), use_cache=False)
        for states, row in zip(hidden, batch, strict=True):
            tokens = torch.tensor(different[row], device=lm.device)
            after = states[len(prompt) - 1 :][: len(tokens)]
            known[different[row]] = sum(
                cross_entropy(lm.logits(after[piece]), tokens[piece], reduction="sum").item()
                for piece in slices(len(tokens), lm.vocab_size, SLICE_ELEMENTS)
            )
    check_no_nan(lm.name, any(map(math.isnan, known.values())))
    return [known[tuple(response)] for response in responses]
