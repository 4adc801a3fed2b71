"""The shards of a data set and their rows: responses, drafted tokens and acceptance probabilities
(SpecDec++, section 3.3).

The draft reads prompt and response once, and so does the target, unless its states were kept when
it wrote them; probabilities are in memory for a slice of positions at a time.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specheads.data_gen.draft_rounds import read_rounds
from specheads.data_gen.settings import DataGeneration
from specheads.decoding.responses import Responder, Response, row_uniforms
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens, slices
from specheads.pair.pair import Pair
from specheads.pair.reading import GivenTexts, read
from specheads.pair.sampling import Warp, accept_prob, has_nan, nan_message, tokens_at
from specheads.prompts.prompt import SPLITS, EncodedPrompt

logger = logging.getLogger(__name__)

# Probabilities of one model that are held at once on a CPU, whose cache takes about as many
SLICE_ELEMENTS = 2**22
_DEVICE_ELEMENTS = 2**26  # other devices would wait for weights and launches with small slices
# The columns of a response's labels: index i is response position i. Where several tokens were
# sampled at each position, the columns `more_` have a list for each sample after the first.
LABELS = ("draft_ids", "accept_prob", "more_draft_ids", "more_accept_prob")
DEPTH = "draft_depth"  # one column more, of drafts that read their target


Labels = Mapping[str, Sequence]  # of a response, by column


@dataclass(frozen=True)
class Shard:
    """The content of one file: response number `sample` to each of `prompts`."""

    prompts: Sequence[EncodedPrompt]
    sample: int = 0


def plan_shards(prompts: Sequence[EncodedPrompt], settings: DataGeneration) -> dict[str, Shard]:
    """Return the files, `train-00000.parquet` and so on.

    First responses come before second ones.
    """
    shards: dict[str, Shard] = {}
    size = settings.rows_per_shard
    for split in SPLITS:
        of_split = [each for each in prompts if each[0].split == split]
        number = 0
        for sample in range(settings.responses_per_prompt if split == "train" else 1):
            for start in range(0, len(of_split), size):
                name = f"{split}-{number:05d}.parquet"
                shards[name] = Shard(of_split[start : start + size], sample)
                number += 1
    return shards


def respond(
    responder: Responder, shards: Sequence[Shard], settings: DataGeneration, **how: Any
) -> list[list[Response]]:
    """Return the target's responses to the prompts of shards of one warp.

    See `Responder.respond` for more arguments.
    """
    prompts = list[Sequence[int]]()
    uniforms = list[np.ndarray]()
    for shard in shards:
        for prompt, ids in shard.prompts:
            prompts.append(ids)
            uniforms.append(uniforms_of(settings, prompt.prompt_id, shard.sample)[0])
    warp = warp_of(settings, next(iter(shards)))
    made = iter(responder.respond(prompts, np.stack(uniforms), warp, **how))
    return [list(islice(made, len(shard.prompts))) for shard in shards]


def response_rows(
    shard: Shard, responses: Sequence[Response], labels: Sequence[Labels | str] = ()
) -> list[dict]:
    """Return the rows of one shard, in the order of its prompts, without those that failed.

    Without labels, the columns of the draft are empty.
    """
    rows = list[dict]()
    empty = dict.fromkeys((*LABELS, DEPTH), ())
    of_rows: Sequence[Labels | str] = labels or [empty] * len(responses)
    for (prompt, ids), response, columns in zip(shard.prompts, responses, of_rows, strict=True):
        failure = columns if isinstance(columns, str) else response.failure
        if failure is not None or isinstance(columns, str):
            logger.warning("data: %s is left out: %s", prompt.where, failure)
            continue
        row = {
            "prompt_id": prompt.prompt_id,
            "sample": shard.sample,
            "split": prompt.split,
            "prompt": prompt.text,
            "prompt_ids": ids,
            "response_ids": response.ids,
            "finished": response.finished,
        }
        rows.append({**empty, **row, **columns})
    return rows


def label_rows(
    pair: Pair,
    shard: Shard,
    responses: Sequence[Response],
    settings: DataGeneration,
    advance: Callable[[int], object] = lambda rows: None,
) -> list[dict]:
    """Return the rows of one shard with drafted tokens and their labels.

    `advance` as in `label_responses`.
    """
    prompts = list[Sequence[int]]()
    uniforms = list[np.ndarray]()
    has_rounds = bool(pair.draft_lm.reads_layers)
    for prompt, ids in shard.prompts:
        prompts.append(ids)
        uniforms.append(uniforms_of(settings, prompt.prompt_id, shard.sample, has_rounds)[1:])
    labels = label_responses(
        pair,
        prompts,
        [response.ids for response in responses],
        np.stack(uniforms),
        settings.warp,
        advance,
        [response.states for response in responses],
    )
    return response_rows(shard, responses, labels)


def uniforms_of(
    settings: DataGeneration, prompt_id: str, sample: int, has_rounds: bool = False
) -> np.ndarray:
    """Return the uniform numbers of a response, of the tokens drafted along it, and with
    `has_rounds` of its rounds; see `read_rounds`.

    A greedy draft drafts one token at each position.
    """
    num_samples = has_rounds + (1 if settings.warp.greedy else settings.samples_per_position)
    return row_uniforms(settings.seed, prompt_id, settings.max_new_tokens, num_samples, sample)


def warp_of(settings: DataGeneration, shard: Shard) -> Warp:
    """Return what turns the target's logits into the probabilities of a shard's responses."""
    # A greedy target has one response. Text that it would not have written shows the heads of a
    # greedy pair more.
    return (
        replace(settings.warp, temperature=1.0)
        if settings.warp.greedy and shard.sample
        else settings.warp
    )


def elements_at_once(device: torch.device) -> int:
    """Return how many probabilities of one model are held at once."""
    return SLICE_ELEMENTS if device.type == "cpu" else _DEVICE_ELEMENTS


@torch.no_grad()
def label_responses(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    uniform: np.ndarray,
    warp: Warp,
    advance: Callable[[int], object] = lambda rows: None,
    states: Sequence[Tensor | None] = (),
) -> list[Labels | str]:
    """Return the labels of each response, which is not empty, by the names of their columns,
    LABELS, with DEPTH for a draft that reads its target; where a model's logits have a NaN, in
    words which.

    `uniform` (B, samples, >= longest response) in [0, 1) has a number per drafted token, and for a
    draft that reads its target one more row, which decides the rounds. `advance`
    takes how much more is done, in responses of mean length: short ones come first. `states` (T, H)
    of responses are the target's, as it wrote them; it reads texts without.
    """
    states = states or [None] * len(prompts)
    results: dict[int, Labels | str] = {}  # the key is the row
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    reported = 0
    done = 0

    def labels_of(rows: Sequence[int]) -> dict[int, Labels | str]:
        texts = GivenTexts.with_responses(
            [prompts[row] for row in rows], [responses[row] for row in rows]
        )
        uniforms = [uniform[row, :, : len(responses[row])] for row in rows]
        numbers = torch.from_numpy(np.concatenate(uniforms, axis=1))
        known = [of_row for row in rows if (of_row := states[row]) is not None]
        of_target = torch.cat(known) if len(known) == len(rows) else None
        return dict(zip(rows, _labels_of(pair, texts, numbers, warp, of_target), strict=True))

    for rows in batches_of_tokens(lengths, BATCH_TOKENS):
        results |= labels_of(rows)
        for row in rows:
            # What is NaN in one text may spread to those that are read with it.
            if len(rows) > 1 and isinstance(results[row], str):
                results |= labels_of([row])
        done += sum(lengths[row] for row in rows)
        advance(len(prompts) * done // sum(lengths) - reported)
        reported = len(prompts) * done // sum(lengths)
    return [results[row] for row in range(len(prompts))]


def _labels_of(
    pair: Pair, texts: GivenTexts, uniforms: Tensor, warp: Warp, of_target: Tensor | None
) -> list[Labels | str]:
    """Return the labels of the N positions of `texts`, by text, or which model had a NaN there.

    `uniforms` (samples, N) decide the drafted tokens, and for a draft that reads its target in one
    more row the rounds; `of_target` as for `read`.
    """
    most = elements_at_once(pair.target_lm.device)
    depths: Sequence[Tensor | None] = [None] * len(texts.tokens)
    if pair.draft_lm.reads_layers:
        states, depth = read_rounds(pair, texts, uniforms[-1], warp, most)
        uniforms = uniforms[:-1]
        depths = texts.of_rows(depth)
    else:
        states = read(pair, texts, of_target)
    device = states.target.device
    uniforms = uniforms.T.contiguous().to(device)
    ids = []
    accept_probs = []
    nans = []
    for piece in slices(len(texts.row), pair.vocab_size, most):
        target_probs = warp(pair.target_lm.logits(states.target[piece]))
        draft_probs = warp(pair.draft_lm.logits(states.draft[piece])).to(device)
        nans.append(torch.stack([has_nan(target_probs), has_nan(draft_probs)], dim=1))
        drafted = tokens_at(draft_probs, uniforms[piece])
        ids.append(drafted)
        accept_probs.append(
            accept_prob(target_probs.gather(1, drafted), draft_probs.gather(1, drafted))
        )
    labels = list[Labels | str]()
    by_text = (texts.of_rows(torch.cat(each).cpu()) for each in (ids, accept_probs, nans))
    for drafted, accepted, nan, of_text in zip(*by_text, depths, strict=True):
        if nan.any():
            is_of_target = bool(nan[:, 0].any())
            labels.append(nan_message(pair.target_id if is_of_target else pair.draft_id))
            continue
        first_ids, *more_ids = drafted.T.tolist()  # one list per sample
        first_probs, *more_probs = accepted.T.tolist()
        columns = dict(zip(LABELS, (first_ids, first_probs, more_ids, more_probs), strict=True))
        if of_text is not None:
            columns[DEPTH] = of_text.tolist()
        labels.append(columns)
    return labels
