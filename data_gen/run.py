"""Make a data set: prompts in, a complete cache out; existing shards are kept."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data_gen.progress import Meter, announce, progress_bar
from data_gen.reuse import reusable_cache, reused_responses
from data_gen.rows import OnStep, Shard, make_rows, plan_shards
from data_gen.settings import RESPONSE_LIMITS, Generation
from data_gen.vllm_runner import VllmResponses, responses_provenance
from specheads.decoding.responses import Responder, Response
from specheads.errors import UserError
from specheads.pair import Pair
from specheads.prompts.encoding import encode_prompts, response_provenance
from specheads.prompts.prompt import SPLITS, LoadedPrompts, Prompt, PromptSource, unique
from specheads.storage.data_set import SCHEMA
from specheads.storage.shards import ShardStore, exclusive, fingerprint

logger = logging.getLogger(__name__)


def generate_data(
    pair: Pair,
    source: PromptSource,
    settings: Generation,
    root: Path,
    splits: Collection[str] = SPLITS,
    labelled: bool = True,
) -> Path:
    """Return the folder of the complete cache for these arguments; missing shards are made first.

    With `labelled` false, responses are enough: an existing cache with labels is used as well, and a new one has no labels and
    fits every draft.

    Raises:
        UserError: no usable prompt; another run at work on the same cache.
    """
    loaded = [prompt for prompt in unique(source.load(pair.chats)) if prompt.split in SPLITS]  # final prompts are for evaluations
    prompts = [prompt for prompt in loaded if prompt.split in splits]
    # A cache with labels, or with more splits than needed, can be used too.
    provenances = [cache_provenance(pair, some, settings, labels) for some in (loaded, prompts) for labels in (True, labelled)]
    for provenance in provenances:
        folder = root / fingerprint(provenance)
        if (folder / "manifest.json").is_file() and ShardStore(folder, provenance, SCHEMA).is_complete():
            logger.info("data: complete in %s", folder)
            return folder
    with exclusive(folder):
        store = ShardStore(folder, provenance, SCHEMA)
        shards = plan_shards(encode_prompts(pair, prompts, settings.limits), settings)
        missing = {name: shard for name, shard in shards.items() if not store.has(name)}
        announce(folder, shards.values(), missing.values(), settings)
        responder = Responder(pair, [len(ids) for shard in shards.values() for _, ids in shard.prompts], settings.limits)
        with progress_bar() as bar, _known_responses(pair, loaded, missing, settings, root, provenance, labelled) as known:
            rows = sum(len(shard.prompts) for shard in missing.values())
            meter = Meter(bar, rows, settings.max_new_tokens, labelled and settings.rollouts_per_response > 0)
            for name, shard in missing.items():
                responses = known(name, meter.add)
                steps = meter.add, meter.add_rollouts
                store.write(name, make_rows(responder, shard, settings, steps, responses, labelled))
                meter.add_labels(len(shard.prompts))
        store.complete(list(shards))
    return folder


@contextmanager
def _known_responses(
    pair: Pair,
    prompts: Sequence[Prompt],
    missing: Mapping[str, Shard],
    settings: Generation,
    root: Path,
    provenance: Mapping[str, Any],
    labelled: bool,
) -> Iterator[Callable[[str, OnStep], list[Response] | None]]:
    """Yield a function that returns the responses to a missing shard, None where the target of the pair is to be asked.

    vLLM makes all responses before the first label, into a cache without labels.
    """
    if settings.runner == "vllm" and not labelled and missing:
        with VllmResponses(pair, missing, settings, root / fingerprint(provenance)) as responses:
            yield lambda name, on_step: responses.of(name, on_step)
        return
    if settings.runner == "vllm":
        splits = {prompt.split for shard in missing.values() for prompt, _ in shard.prompts}
        reusable = generate_data(pair, LoadedPrompts(prompts), settings, root, splits, labelled=False) if missing else None
    else:
        reusable = reusable_cache(root, provenance)

    def copied(name: str, on_step: OnStep) -> list[Response] | None:
        shard = missing[name]
        responses = reused_responses(reusable, name, shard.prompts, shard.sample, pair, settings) if reusable else None
        if responses is not None:
            on_step(0, len(responses))
        elif settings.runner == "vllm":
            raise UserError(
                f"{name} in {reusable} has changed since vLLM wrote it; remove that folder and run the command again."
            )
        return responses

    yield copied


def cache_provenance(pair: Pair, prompts: Sequence[Prompt], settings: Generation, labelled: bool) -> dict[str, Any]:
    """Return everything that decides a cache's content. Responses depend on the draft only by the length of its window."""
    provenance, sizes = response_provenance(pair, prompts, settings.warp, settings.seed), settings.sizes()
    provenance |= responses_provenance(settings)
    if labelled:
        return provenance | {"settings": sizes}
    return provenance | {
        "draft": ["every draft", f"of window {pair.window}"],
        "dtype": [str(pair.target.dtype), "any"],
        "settings": {name: value for name, value in sizes.items() if name in RESPONSE_LIMITS},
    }
