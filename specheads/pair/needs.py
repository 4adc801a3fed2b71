"""The memory that work with a pair takes, said before it begins."""

import logging
from collections.abc import Mapping

import torch

from specheads.load import available_memory, memory_in_use
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import BATCH_TOKENS, SLICE_ELEMENTS
from specheads.storage.files import amount

logger = logging.getLogger(__name__)


def memory_parts(
    lm: LanguageModel,
    positions: float = 0,
    tokens: float = BATCH_TOKENS,
    rows: float = BATCH_TOKENS,
    most: int = SLICE_ELEMENTS,
) -> dict[str, float]:
    """Return the bytes by name that reading `tokens`, keeping keys of `positions` and `rows` of
    distributions (V,) allocate.
    """
    itemsize = lm.output_embedding.weight.itemsize
    hidden = lm.hidden_size
    keys = 0
    width = 0
    for config in lm.layer_configs:
        # Without attention: about as for a head of one
        num_queries = getattr(config, "num_attention_heads", None) or hidden
        num_heads = getattr(config, "num_key_value_heads", None) or num_queries
        keys += num_heads * (getattr(config, "head_dim", None) or config.hidden_size // num_queries)
        width = max(
            width,
            getattr(config, "intermediate_size", None)
            or getattr(config, "ffn_dim", None)
            or 4 * hidden,
        )
    return {
        "keys and values": positions * 2 * keys * itemsize,
        # Of one layer: two maps of the MLP, the activation and their product; its input, its norm,
        # the sum and the output.
        "activations": tokens * (4 * width + 4 * hidden) * itemsize,
        # Logits, probabilities, and what a warp makes in between.
        "distributions": 6 * min(rows * lm.vocab_size, most) * lm.probs_dtype.itemsize,
    }


def memory_to_read(
    target: LanguageModel,
    draft: LanguageModel,
    num_steps: int,
    with_target: bool = False,
    most: int = SLICE_ELEMENTS,
) -> list[dict[str, float]]:
    """Return `memory_parts` of reading given texts by a draft, and by its target where the draft
    reads that, in `num_steps` steps, or `with_target`.
    """
    reads = bool(draft.reads_layers)
    parts = [memory_parts(draft, num_steps * BATCH_TOKENS * reads, most=most)]
    if reads or with_target:
        rows = BATCH_TOKENS * with_target
        parts.append(memory_parts(target, rows=rows, most=most))
    if reads:
        size = len(draft.reads_layers) * target.hidden_size
        itemsize = target.output_embedding.weight.itemsize
        parts.append({"the target's states": BATCH_TOKENS * size * itemsize})
    return parts


def memory_of(stage: str, lm: LanguageModel, *parts: Mapping[str, float]) -> str:
    """Return the memory of a stage at its peak, in use and the bytes of `parts` by name, and warn
    where less is available.
    """
    if lm.device.type == "cuda":
        used = torch.cuda.memory_allocated(lm.device)
        free = float(torch.cuda.mem_get_info(lm.device)[0])
    else:
        used = memory_in_use()
        free = available_memory()
    new = dict[str, float]()
    for part in parts:
        for name, num_bytes in part.items():
            new[name] = new.get(name, 0) + num_bytes
    needed = sum(new.values())
    if needed > free:
        how = (
            "%s: about %s more memory is needed, but %s are available; take smaller batches,"
            " shorter texts or smaller models"
        )
        logger.warning(how, stage, amount(needed), amount(free))
    listed = [f"{name} {amount(size)}" for name, size in new.items() if size >= 1e6]
    return (
        f"about {amount(used + needed)} of memory"
        f" ({', '.join([f'weights and all in use {amount(used)}', *listed])})"
    )
