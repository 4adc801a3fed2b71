"""Make a data set: prompts in, a complete cache out; existing shards are kept."""

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from data_gen.progress import Meter, announce, progress_bar
from data_gen.reuse import reusable_cache, reused_responses
from data_gen.rows import make_rows, plan_shards
from data_gen.settings import RESPONSE_LIMITS, Generation
from specheads.decoding.responses import Responder
from specheads.pair import Pair
from specheads.prompts.encoding import encode_prompts, response_provenance
from specheads.prompts.prompt import SPLITS, Prompt, PromptSource, unique
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
        reusable = reusable_cache(root, provenance)
        responder = Responder(pair, [len(ids) for shard in shards.values() for _, ids in shard.prompts], settings.limits)
        with progress_bar() as bar:
            meter = Meter(bar, settings.tokens_per_response * sum(len(shard.prompts) for shard in missing.values()))
            for name, shard in missing.items():
                responses = reused_responses(reusable, name, shard.prompts, shard.sample, pair, settings) if reusable else None
                store.write(name, make_rows(responder, shard, settings, meter.add, responses, labelled))
        store.complete(list(shards))
    return folder


def cache_provenance(pair: Pair, prompts: Sequence[Prompt], settings: Generation, labelled: bool) -> dict[str, Any]:
    """Return everything that decides a cache's content. Responses depend on the draft only by the length of its window."""
    provenance, sizes = response_provenance(pair, prompts, settings.warp, settings.seed), settings.sizes()
    if labelled:
        return provenance | {"settings": sizes}
    return provenance | {
        "draft": ["every draft", f"of window {pair.window}"],
        "dtype": [str(pair.target.dtype), "any"],
        "settings": {name: value for name, value in sizes.items() if name in RESPONSE_LIMITS},
    }
