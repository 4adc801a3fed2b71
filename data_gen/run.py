"""Make a data set: prompts in, a complete cache out; existing shards are kept."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
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
from specheads.storage.shards import ShardStore, fingerprint, in_lots

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

    Any number of processes that make this call, on any number of machines with the folder, share the work.
    With `labelled` false, responses are enough: an existing cache with labels is used as well, and a new one has no labels and
    fits every draft.

    Raises:
        UserError: no usable prompt; a worker with other versions of packages at work on the same cache.
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
    store = ShardStore(folder, provenance, SCHEMA)
    shards = plan_shards(encode_prompts(pair, prompts, settings.limits), settings)
    to_do = [shard for name, shard in shards.items() if not store.has(name)]
    announce(folder, shards.values(), to_do, settings)
    responder = Responder(pair, [len(ids) for shard in shards.values() for _, ids in shard.prompts], settings.limits)
    with progress_bar() as bar, _known_responses(pair, loaded, shards, settings, root, store, labelled) as known:
        rows = sum(len(shard.prompts) for shard in to_do)
        meter = Meter(bar, rows, settings.max_new_tokens, labelled and settings.rollouts_per_response > 0)
        lots = settings.num_lots if settings.by_vllm and not labelled else None
        with store.missing(list(shards), lambda name: meter.skip(len(shards[name].prompts)), lots) as missing:
            for name in missing:
                responses = known(name, meter.add)
                steps = meter.add, meter.add_rollouts
                store.write(name, make_rows(responder, shards[name], settings, steps, responses, labelled))
                meter.add_labels(len(shards[name].prompts))
            store.complete(list(shards))
    return folder


@contextmanager
def _known_responses(
    pair: Pair,
    prompts: Sequence[Prompt],
    shards: Mapping[str, Shard],
    settings: Generation,
    root: Path,
    store: ShardStore,
    labelled: bool,
) -> Iterator[Callable[[str, OnStep], list[Response] | None]]:
    """Yield a function that returns the responses to a missing shard, None where the target of the pair is to be asked.

    vLLM makes all responses before the first label, into a cache without labels.
    """
    if settings.by_vllm and not labelled:
        with ExitStack() as stack:

            @cache  # it starts when the first responses are needed: another worker may have made all of them
            def vllm(lot: tuple[str, ...]) -> VllmResponses:
                stack.close()  # the one of the lot before
                missing = {name: shards[name] for name in lot if not store.has(name)}
                return stack.enter_context(VllmResponses(pair, missing, settings, store.folder))

            lot_of = {name: lot for lot in in_lots(list(shards), settings.num_lots) for name in lot}
            yield lambda name, on_step: vllm(lot_of[name]).of(name, on_step)
        return
    if settings.by_vllm:
        splits = {prompt.split for name, shard in shards.items() if not store.has(name) for prompt, _ in shard.prompts}
        reusable = generate_data(pair, LoadedPrompts(prompts), settings, root, splits, labelled=False) if splits else None
    else:
        reusable = reusable_cache(root, store.provenance)

    def copied(name: str, on_step: OnStep) -> list[Response] | None:
        shard = shards[name]
        responses = reused_responses(reusable, name, shard.prompts, shard.sample, pair, settings) if reusable else None
        if responses is not None:
            on_step(0, len(responses))
        elif settings.by_vllm:
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
