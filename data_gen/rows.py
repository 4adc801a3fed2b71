"""The shards of a data set and their rows."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace

import numpy as np

from data_gen.labels import Labels, label_responses
from data_gen.rollouts import Rollouts, roll_out, rollout_uniforms
from data_gen.settings import Generation
from specheads.decoding.responses import Responder, Response, row_uniforms
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp
from specheads.prompts.encoding import EncodedPrompt
from specheads.prompts.prompt import SPLITS


@dataclass(frozen=True)
class Shard:
    """The content of one file: response number `sample` to each of `prompts`."""

    prompts: Sequence[EncodedPrompt]
    sample: int = 0


def plan_shards(prompts: Sequence[EncodedPrompt], settings: Generation) -> dict[str, Shard]:
    """Return the files, `train-00000.parquet` and so on; first responses come before second ones."""
    shards: dict[str, Shard] = {}
    for split in SPLITS:
        rows = [row for row in prompts if row[0].split == split]
        parts = [
            Shard(rows[start : start + settings.rows_per_shard], sample)
            for sample in range(settings.responses_per_prompt if split == "train" else 1)
            for start in range(0, len(rows), settings.rows_per_shard)
        ]
        shards |= {f"{split}-{number:05d}.parquet": shard for number, shard in enumerate(parts)}
    return shards


def respond(
    responder: Responder, shard: Shard, settings: Generation, on_step: Callable[[int, int], None] = lambda made, ended: None
) -> list[Response]:
    """Return the target's responses to the prompts of a shard; see `Responder.respond`, whose plan has these prompts."""
    uniform = np.stack([uniforms_of(settings, prompt.prompt_id, shard.sample)[0] for prompt, _ in shard.prompts])
    return responder.respond([ids for _, ids in shard.prompts], uniform, warp_of(settings, shard), on_step)


def response_rows(
    shard: Shard, responses: Sequence[Response], labels: Sequence[Labels] = (), rollouts: Sequence[Rollouts] = ()
) -> list[dict]:
    """Return the rows of one shard, in the order of its prompts; without labels, the columns of the draft are empty."""
    labels = labels or [Labels(*([] for _ in fields(Labels)))] * len(responses)
    rollouts = rollouts or [Rollouts(*([] for _ in fields(Rollouts)))] * len(responses)
    return [
        {
            "prompt_id": prompt.prompt_id,
            "sample": shard.sample,
            "split": prompt.split,
            "prompt": prompt.text,
            "prompt_ids": prompt_ids,
            "response_ids": response.ids,
            "finished": response.finished,
            **asdict(labels_of_row),
            **asdict(rollouts_of_row),
        }
        for (prompt, prompt_ids), response, labels_of_row, rollouts_of_row in zip(
            shard.prompts, responses, labels, rollouts, strict=True
        )
    ]


def label_rows(pair: Pair, shard: Shard, responses: Sequence[Response], settings: Generation) -> list[dict]:
    """Return the rows of one shard with drafted tokens, their labels and rollouts."""
    ids, answers = [ids for _, ids in shard.prompts], [response.ids for response in responses]
    uniform = np.stack([uniforms_of(settings, prompt.prompt_id, shard.sample)[1:] for prompt, _ in shard.prompts])
    labels = label_responses(pair, ids, answers, uniform, settings.label_warp)
    sizes = shard.sample, settings.rollouts_per_response, settings.rollout_tokens
    uniform = np.stack([rollout_uniforms(settings.seed, prompt.prompt_id, *sizes) for prompt, _ in shard.prompts])
    limits = settings.max_new_tokens, settings.batch_size
    return response_rows(shard, responses, labels, roll_out(pair, ids, answers, uniform, settings.label_warp, *limits))


def uniforms_of(settings: Generation, prompt_id: str, sample: int) -> np.ndarray:
    """Return the uniform numbers of a response and of the tokens drafted along it; a greedy draft drafts one at each position."""
    num_samples = 1 if settings.label_warp.greedy else settings.samples_per_position
    return row_uniforms(settings.seed, prompt_id, settings.max_new_tokens, num_samples, sample)


def warp_of(settings: Generation, shard: Shard) -> Warp:
    """Return what turns the target's logits into the probabilities of a shard's responses."""
    # A greedy target has one response. Text that it would not have written shows the heads of a greedy pair more.
    return replace(settings.warp, temperature=1.0) if settings.warp.greedy and shard.sample else settings.warp
