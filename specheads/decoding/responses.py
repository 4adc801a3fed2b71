"""Target responses in batches: rows of similar prompt length, left-padded; finished rows leave the batch.

Each row has separate uniform numbers, so its samples depend neither on its neighbours nor on timing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specheads.decoding.engine import EagerEngine
from specheads.language_model import LanguageModel
from specheads.padding import batches_of_rows, left_padded
from specheads.pair import Pair
from specheads.prompts.encoding import ResponseLimits
from specheads.sampling import Warp, check_finite, sample

# Prompts are read in columns of at most this many tokens over all rows, so that activations stay small (and in a CPU's cache).
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Response:
    """The target's response: `ids` with the stop token, if there is one; `finished` says whether there is."""

    ids: list[int]
    finished: bool


def row_uniforms(seed: int, prompt_id: str, max_new_tokens: int, num_samples: int = 1, response: int = 0) -> np.ndarray:
    """Return (1 + num_samples, max_new_tokens) uniform numbers of a prompt's response number `response`.

    Row 0 samples the response, the others the drafted tokens, `num_samples` at each position.
    """
    seeds = [seed, int(prompt_id, 16)] + ([0, response] if response else [])
    return np.random.default_rng(seeds).random((1 + num_samples, max_new_tokens))


def make_responses(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    uniform: np.ndarray,
    warp: Warp,
    limits: ResponseLimits,
    on_step: Callable[[int, int], None],
) -> list[Response]:
    """Return the target's responses in the order of `prompts`, batch by batch; see `generate_batch`."""
    responses: dict[int, Response] = {}
    for batch in batches_of_rows([len(prompt) for prompt in prompts], limits.batch_size):
        batch_prompts = [prompts[row] for row in batch]
        answers = generate_batch(pair, batch_prompts, uniform[batch], warp, limits.max_new_tokens, on_step)
        for row, response in zip(batch, answers, strict=True):
            responses[row] = response
    return [responses[row] for row in range(len(prompts))]


@torch.no_grad()
def generate_batch(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    uniform: np.ndarray,
    warp: Warp,
    max_new_tokens: int,
    on_step: Callable[[int, int], None] = lambda num_tokens, num_done: None,
    lm: LanguageModel | None = None,
) -> list[Response]:
    """Return the response of the target, or of `lm`, to each prompt of one batch.

    Args:
        prompts: token ids per row.
        uniform: (B, max_new_tokens) in [0, 1), one number per sampled token.
        on_step: called after each step with the number of tokens it produced, and with that number plus the unused part of
            `max_new_tokens` of all rows that ended in it; the latter add up to B * max_new_tokens.
    """
    lm = lm or pair.target_lm
    limits = [min(max_new_tokens, pair.window - len(prompt)) for prompt in prompts]
    engine, tokens, positions, mask = _read_prompts(lm, prompts, max(limits))
    device, model_id = lm.device, pair.target_id if lm is pair.target_lm else pair.draft_id
    uniforms = torch.from_numpy(np.ascontiguousarray(uniform)).to(device)
    stops = torch.tensor(sorted(pair.stop_tokens), device=device)
    rows = torch.arange(len(prompts), device=device)  # which prompt each batch row is
    active = torch.ones(len(prompts), dtype=torch.bool, device=device)
    limit = torch.tensor(limits, device=device)
    responses = torch.zeros((len(prompts), max(limits)), dtype=torch.long, device=device)
    num_tokens = torch.zeros_like(limit)
    finished = torch.zeros_like(active)
    for step in range(max(limits)):
        output = engine.forward(tokens, positions=positions, attention_mask=mask[:, : engine.length + 1])
        probs = warp(output.logits[:, -1])
        check_finite(model_id, probs)
        token = sample(probs, uniforms[rows, step])
        responses[rows, step] = token
        num_tokens[rows] += 1
        finished[rows] = torch.isin(token, stops)
        active &= ~finished & (num_tokens < limit)
        staying = active[rows]
        count = int(staying.sum())
        on_step(len(rows), len(rows) + int((max_new_tokens - num_tokens[rows[~staying]]).sum()))
        if count == 0:
            break
        tokens, positions = token[:, None], positions + 1
        if count < len(rows):
            kept = rows_that_stay(staying)
            engine.select_rows(kept)
            rows, mask, tokens, positions = rows[kept], mask[kept], tokens[kept], positions[kept]
    counts, ends, ids = num_tokens.tolist(), finished.tolist(), responses.tolist()
    return [Response(ids=row[:count], finished=end) for row, count, end in zip(ids, counts, ends, strict=True)]


def _read_prompts(
    lm: LanguageModel, prompts: Sequence[Sequence[int]], most_new: int
) -> tuple[EagerEngine, Tensor, Tensor, Tensor]:
    """Read all tokens of left-padded prompts but the last ones.

    Return the engine, the last tokens (B, 1), their positions (B, 1), and the mask of the whole run, (B, T + most_new): step i
    reads its first T + i columns.
    """
    tokens, mask = left_padded(prompts, lm.device)
    longest = tokens.shape[1]
    engine = EagerEngine(lm, longest + most_new)
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    mask = torch.cat([mask, mask.new_ones((len(prompts), most_new))], dim=1)
    columns = max(1, PREFILL_TOKENS // len(prompts))
    for start in range(0, longest - 1, columns):
        part = slice(start, min(start + columns, longest - 1))
        engine.forward(tokens[:, part], positions=positions[:, part], attention_mask=mask[:, : part.stop], num_logits=0)
    return engine, tokens[:, -1:], positions[:, -1:], mask


def rows_that_stay(staying: Tensor) -> Tensor:
    """Return the rows (n,) that continue, for `staying` (B,) bool with n rows set: the last ones fill the gaps."""
    count = int(staying.sum())
    places = torch.arange(count, device=staying.device)
    places[~staying[:count]] = staying[count:].nonzero().squeeze(1) + count
    return places
