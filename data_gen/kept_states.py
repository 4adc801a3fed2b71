"""The target's hidden states of responses on disk, from the time it writes them until they are
labelled: it then need not read its responses again, which is nine tenths of the labels' time.

Labels from kept states and from a second reading differ by the rounding of sums. Which shards have
states therefore depends on settings alone, and what a run is killed in is made again as a whole.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import Shard
from specheads.decoding.responses import Response
from specheads.heads.portable.tensor_file import read_tensors, write_tensors
from specheads.pair.pair import Pair
from specheads.storage.files import space_of, write_whole
from specheads.storage.shards import ShardStore

logger = logging.getLogger(__name__)

MOST_BYTES = 2e9  # of the states of all shards
# Tokens times weights of a shard, whose states a killed process loses with its responses: five
# minutes on two cores
MOST_WORK = 1e13


def shards_with_states(
    pair: Pair, shards: Mapping[str, Shard], settings: DataGeneration
) -> list[str]:
    """Return the first shards, as many as there is room for; none where states would gain nothing:
    on other devices reading takes a small part of writing, and a draft that reads the target's
    layers needs more than states.
    """
    lm = pair.target_lm
    of_cpu = settings.runner == "local" and lm.device.type == "cpu"
    if not of_cpu or pair.draft_lm.reads_layers:
        return []
    names = []
    num_bytes = 0
    for name, shard in shards.items():
        num_tokens = len(shard.prompts) * settings.max_new_tokens
        num_bytes += num_tokens * _bytes_of_token(pair)
        if num_bytes > MOST_BYTES or num_tokens * lm.model.num_parameters() > MOST_WORK:
            break
        names.append(name)
    return names


def announce_states(
    pair: Pair, shards: Mapping[str, Shard], settings: DataGeneration, store: ShardStore
) -> None:
    """Log how much disk the states of some shards take at most."""
    num_rows = sum(len(shard.prompts) for shard in shards.values())
    num_bytes = num_rows * settings.max_new_tokens * _bytes_of_token(pair)
    space = space_of("states", num_bytes, store.folder)
    logger.info("data: the target's states are kept until they are labelled, %s at most", space)


def _bytes_of_token(pair: Pair) -> int:
    lm = pair.target_lm
    return lm.hidden_size * lm.output_embedding.weight.itemsize


def _path(store: ShardStore, name: str) -> Path:
    return store.folder / f".{name}.states"


def keep_states(store: ShardStore, name: str, responses: Sequence[Response]) -> None:
    """Write the states of a shard's responses, before the shard is: they exist where it does."""
    ids = list[int]()
    parts = []
    for response in responses:
        if response.failure is None and response.states is not None:
            ids += response.ids
            parts.append(response.states)
    if not parts:
        return
    tensors = {"ids": torch.tensor(ids), "states": torch.cat(parts)}
    write_whole(_path(store, name), lambda temporary: write_tensors(tensors, temporary))


def with_states(store: ShardStore, name: str, responses: Sequence[Response]) -> Sequence[Response]:
    """Return a shard's responses with their states, or unchanged where none are kept for them."""
    path = _path(store, name)
    if not path.is_file():
        return responses
    try:
        kept = read_tensors(path)
    except (ValueError, OSError) as error:
        logger.warning("data: the target reads %s again: %s", name, error)
        return responses
    ids = torch.tensor([token for response in responses for token in response.ids])
    if not torch.equal(kept["ids"], ids):
        return responses
    parts = kept["states"].split([len(response.ids) for response in responses])
    pairs = zip(responses, parts, strict=True)
    return [replace(response, states=states) for response, states in pairs]


def remove_states(store: ShardStore, names: Collection[str]) -> None:
    """Remove the states of shards that are labelled."""
    for name in names:
        _path(store, name).unlink(missing_ok=True)
