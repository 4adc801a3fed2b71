"""The predictions of heads for the nodes of a recording, and the true acceptance probabilities,
which the target knows.

Each predictor's values are added in `predictions/<fingerprint>/` next to the recording when they
are first needed.
"""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from specheads.decoding.branches import Branches, TextReader
from specheads.decoding.engine import bulk_operations
from specheads.heads.features import RECORDED, drafting_features, reads_logits
from specheads.heads.head import AcceptanceHead
from specheads.load import adapt_threads, threads_by_load
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, accept_prob, active, check_numbers, computing_with
from specheads.progress import Advance, progress
from specheads.prompts.prompt import EncodedPrompt
from specheads.replay.chains import chain_probs, chain_states
from specheads.replay.recording import (
    GROUND_TRUTH,
    Recorder,
    Recording,
    StoredResponse,
    branches_of,
    load_recording,
)
from specheads.replay.response_tree import branch_probs, node_states, response_probs
from specheads.storage.shards import ShardStore, made_manifest

logger = logging.getLogger(__name__)

SCHEMA = pa.schema({"values": pa.list_(pa.float32())})  # one for every node of a response


def add_predictions(
    folder: Path,
    pair: Pair,
    heads: Mapping[str, AcceptanceHead],
    ground_truth: bool,
    advance: Advance = lambda count: None,
) -> list[str]:
    """Add missing predictions of `heads` (by fingerprint) to a recording, and the target's for
    `ground_truth`; return all names.

    `advance` is called with the number of prompts once for the heads and once for the target, also
    where nothing was missing.
    """
    manifest = made_manifest(folder)
    warp = Warp(**manifest["provenance"]["warp"])
    num_rows = sum(shard["rows"] for shard in manifest["shards"].values())
    stores = {name: _store(folder, name) for name in heads}
    missing = {name: store for name, store in stores.items() if not store.is_complete()}
    if missing:
        values_of = _head_values(pair, [heads[name] for name in missing])
        _predict(folder, list(missing.values()), pair.draft_lm, values_of, advance)
    elif heads:
        advance(num_rows)
    target_store = _store(folder, GROUND_TRUTH)
    if ground_truth and not target_store.is_complete():
        _predict(folder, [target_store], pair.target_lm, _ground_truth(pair, warp), advance)
    elif ground_truth:
        advance(num_rows)
    return [*heads, *([GROUND_TRUTH] if ground_truth else [])]


# The values of each predictor, from a stored response and its branches
_Values = Callable[[StoredResponse, Branches], list[Tensor]]


def record_sets(
    recorder: Recorder,
    sets: Mapping[str, Sequence[EncodedPrompt]],
    heads: Sequence[AcceptanceHead],
    ground_truth: bool,
) -> dict[str, Recording]:
    """Return the recording of each set by name, with predictions of `heads`, and with
    `ground_truth` the true probabilities.
    """
    named = {head_fingerprint(head): head for head in heads}
    total = sum(map(len, sets.values()))
    folders = recorder.record(list(sets.values()))
    names: list[list[str]] = [[] for _ in folders]
    # The target takes longer than heads.
    for what, some, truth in (("heads", named, False), ("the target", {}, ground_truth)):
        if some or truth:
            with progress(f"predictions of {what}", total) as advance:
                for folder, of_folder in zip(folders, names, strict=True):
                    of_folder += add_predictions(folder, recorder.pair, some, truth, advance)
    return dict(zip(sets, map(load_recording, folders, names), strict=True))


def _store(folder: Path, name: str) -> ShardStore:
    provenance = {"predictor": name, "of": made_manifest(folder)["shards"]}
    return ShardStore(folder / "predictions" / name, provenance, SCHEMA)


def _predict(
    folder: Path,
    stores: Sequence[ShardStore],
    lm: LanguageModel,
    values_of: _Values,
    advance: Advance,
) -> None:
    """Write a shard of predictions for every shard of the recording.

    Another process that needs them, too, waits.
    """
    manifest = made_manifest(folder)
    shards = manifest["shards"]
    max_tokens = manifest["provenance"]["settings"]["max_tokens"]
    logger.info(
        "predicting: %d values of each token of %d shards of prompts, in %s",
        len(stores),
        len(shards),
        folder,
    )
    with computing_with(bulk_operations(lm.device)), threads_by_load(), ExitStack() as stack:
        missing = set[str]()  # by any of the stores
        for store in sorted(stores, key=lambda each: each.folder):
            missing |= set(stack.enter_context(store.missing(sorted(shards))))
        for shard in sorted(shards):
            if shard not in missing:
                advance(shards[shard]["rows"])
                continue
            predictions: list[list[dict[str, object]]] = [[] for _ in stores]
            table = pq.read_table(folder / shard)
            columns = [
                name for name in StoredResponse.__annotations__ if name in table.schema.names
            ]
            for row in table.select(columns).to_pylist():
                adapt_threads()
                found = values_of(row, branches_of(row, max_tokens))
                check_numbers(lm.name, *found)
                for rows, values in zip(predictions, found, strict=True):
                    rows.append({"values": values.float().cpu().numpy()})
                advance(1)
            for store, rows in zip(stores, predictions, strict=True):
                store.write(shard, rows)
        for store in stores:
            store.complete(sorted(shards))


def _head_values(pair: Pair, heads: Sequence[AcceptanceHead]) -> _Values:
    """Return what computes logits of heads, one for every node."""
    lm = pair.draft_lm
    reader = None if lm.reads_layers else TextReader(lm)
    needs = frozenset[str]().union(*(head.config.inputs for head in heads))
    computed = needs - set(RECORDED)

    def of_nodes(
        tokens: Tensor, hidden: Tensor, depth: Tensor | None, recorded: dict[str, Tensor]
    ) -> list[Tensor]:
        logits = lm.logits(hidden) if reads_logits(computed) else hidden
        sums_of = active().softmax_sums
        features = drafting_features(
            computed, logits, tokens, hidden, lm.embed, lm.kept_tokens, sums_of, depth
        )
        return [head.to(lm.device)(features | recorded) for head in heads]

    @torch.no_grad()
    def of_row(row: StoredResponse, branches: Branches) -> list[Tensor]:
        columns: Mapping[str, object] = row
        recorded = dict[str, Tensor]()
        for name in needs - computed:
            recorded[name] = torch.tensor(columns[name], device=lm.device)
        parts = list[list[Tensor]]()
        first = 0
        text = row["prompt_ids"], row["response_ids"]
        nodes = (
            chain_states(pair, *text, branches)
            if reader is None
            else node_states(reader, *text, branches)
        )
        for tokens, hidden, depth in nodes:
            for piece in slices(len(tokens), lm.vocab_size, SLICE_ELEMENTS):
                end = first + len(tokens[piece])
                here = {name: values[first:end] for name, values in recorded.items()}
                of_piece = None if depth is None else depth[piece]
                parts.append(of_nodes(tokens[piece], hidden[piece], of_piece, here))
                first = end
        return [torch.cat(values) for values in zip(*parts, strict=True)]

    return of_row


def _ground_truth(pair: Pair, warp: Warp) -> _Values:
    """Return what computes the chance that token verification accepts each node after all nodes
    before it were accepted.
    """
    reader = TextReader(pair.target_lm)

    def of_row(row: StoredResponse, branches: Branches) -> list[Tensor]:
        draft_prob = torch.tensor(row["law_prob"])
        of_response = response_probs(reader, warp, row["prompt_ids"], row["response_ids"])
        if pair.draft_lm.reads_layers:
            places = row["branch_start"], row["branch_accepted"]
            start, num_accepted = (torch.tensor(each, dtype=torch.long) for each in places)
            probs = chain_probs(
                reader, warp, branches, start, num_accepted, of_response, draft_prob
            )
        else:
            of_branches = branch_probs(reader, warp, branches, draft_prob[len(of_response) :])
            probs = torch.cat([of_response, of_branches.to(of_response)])
        return [accept_prob(probs, draft_prob.to(probs))]

    return of_row


def head_fingerprint(head: AcceptanceHead) -> str:
    """Return the fingerprint of a head: of its weights, its inputs and which token it predicts."""
    digest = hashlib.sha256(repr((head.config.predicts, head.config.inputs)).encode())
    for value in head.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
