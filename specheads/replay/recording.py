"""Recordings on disk and in memory: `recordings/<fingerprint>/` under the data folder, Parquet shards of `record_response`'s rows.

What a head says of every node lies beside them in `judges/<fingerprint>/`, and so do the true acceptance probabilities: each is added
in one pass of one model whenever it is asked for, and the recording stays. Shards appear by rename, with checksums; a restart
makes what is missing.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data_gen.generate import row_uniforms
from data_gen.run import EncodedPrompt, GenerationSettings, facts_of, make_responses
from data_gen.shards import ShardStore, exclusive, fingerprint, read_manifest
from specheads.decoding.branches import Branches
from specheads.decoding.drafting import drafting_features
from specheads.heads.head import AcceptanceHead
from specheads.pair import LanguageModel, Pair
from specheads.replay.record import (
    COLUMNS,
    FEATURES,
    SLICE_ELEMENTS,
    Draws,
    RecordSettings,
    node_states,
    record_response,
)
from specheads.sampling import Warp, accept_prob

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
ROWS_PER_SHARD = 32  # a restart repeats at most one shard
BYTES_PER_NODE = 4 * (len(COLUMNS) + 1)  # before compression
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "limit": pa.int32(),  # tokens at which the response would have ended
        "finished": pa.bool_(),  # whether it ended with an end-of-sequence token
        "accepted": pa.list_(pa.bool_()),  # (Q, N), whether a token came from an accepted draft token
        "branch_draw": pa.list_(pa.int16()),  # the draw and the position each branch belongs to, and its number of tokens
        "branch_start": pa.list_(pa.int32()),
        "branch_length": pa.list_(pa.int16()),
        "branch_ids": pa.list_(pa.int32()),  # of one branch after another
        **{name: pa.list_(pa.float32()) for name in COLUMNS},  # of every node: the response's tokens, then the branches'
    }
)
JUDGEMENTS = pa.schema({"values": pa.list_(pa.float32())})  # of every node of a response
TRUTH = "truth"  # the judge that knows the acceptance probabilities

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Recording:
    """Recorded responses, flat: P of them with N tokens in all, which are the first N nodes; then the nodes of all branches.

    Q acceptance draws. Each draw has at each position either an accepted token or a branch of so many nodes (0 where decoding would
    not have drafted).
    """

    prompt_ids: list[str]
    prompts: list[list[int]]
    first: Tensor  # (P,) long, each response's first node
    lengths: Tensor  # (P,) long, its tokens
    limits: Tensor  # (P,) long, tokens at which it would have ended
    finished: Tensor  # (P,) bool, whether an end-of-sequence token ended it
    accepted: Tensor  # (Q, N) bool
    branch_first: Tensor  # (Q, N) long, a branch's first node
    branch_length: Tensor  # (Q, N) long
    tokens: Tensor  # (nodes,) long
    features: dict[str, Tensor]  # (nodes,) each: what rules see of a node, and by name what judges say of it
    max_tokens: int  # the longest draft that can be replayed

    @property
    def num_draws(self) -> int:
        return len(self.accepted)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def response(self, number: int) -> list[int]:
        """Return the tokens of one response."""
        start = int(self.first[number])
        return self.tokens[start : start + int(self.lengths[number])].tolist()

    def labels(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the draft's token at every position of every draw, as it stands after what was emitted before.

        Nodes (n,) of the tokens, of the tokens that the draft proposes after them (-1: none recorded), and whether they are accepted.
        """
        branched = self.branch_length > 0
        position = torch.arange(self.accepted.shape[1]).expand_as(self.accepted)
        # What is at the limit is the target's, whoever would agree.
        undrafted = torch.zeros(self.accepted.shape[1], dtype=torch.bool)
        undrafted[(self.first + self.lengths - 1)[self.lengths == self.limits]] = True
        known = (self.accepted & ~undrafted) | branched
        node = torch.where(self.accepted, position, self.branch_first)
        last = torch.zeros(self.accepted.shape[1], dtype=torch.bool)
        last[self.first + self.lengths - 1] = True
        after = torch.where(self.accepted, torch.where(last, -1, position + 1), torch.where(self.branch_length > 1, node + 1, -1))
        return node[known], after[known], self.accepted[known]


def make_recording(
    pair: Pair,
    prompts: Sequence[EncodedPrompt],
    warp: Warp,
    generation: GenerationSettings,
    settings: RecordSettings,
    seed: int,
    root: Path,
    advance: Advance = lambda count: None,
) -> Path:
    """Return the folder of the complete recording of `prompts`, made or finished first if need be.

    `advance` is called with the number of prompts that are done.
    """
    settings = RecordSettings(1 if warp.greedy else settings.num_draws, settings.max_tokens, settings.batch_size)
    facts = facts_of(pair, [prompt for prompt, _ in prompts], warp, seed) | {
        "generation": [generation.max_new_tokens, generation.batch_size],
        "settings": asdict(settings),
        "recording": FORMAT_VERSION,
    }
    folder = root / "recordings" / fingerprint(facts)
    if ShardStore(folder, facts, SCHEMA).is_complete():
        advance(len(prompts))
        return folder
    with exclusive(folder):
        store = ShardStore(folder, facts, SCHEMA)
        shards = {
            f"{start:06d}.parquet": prompts[start : start + ROWS_PER_SHARD] for start in range(0, len(prompts), ROWS_PER_SHARD)
        }
        _announce(folder, len(prompts), generation.max_new_tokens, settings)
        for name, rows in shards.items():
            if store.has(name):
                advance(len(rows))
            else:
                store.write(name, list(_record(pair, rows, warp, generation, settings, seed, advance)))
        store.complete(list(shards))
    return folder


def _record(
    pair: Pair,
    prompts: Sequence[EncodedPrompt],
    warp: Warp,
    generation: GenerationSettings,
    settings: RecordSettings,
    seed: int,
    advance: Advance,
) -> Iterator[dict[str, Any]]:
    """Yield the finished rows of one shard."""
    ids, most = [ids for _, ids in prompts], generation.max_new_tokens
    uniform = np.stack([row_uniforms(seed, prompt.prompt_id, most)[0] for prompt, _ in prompts])
    responses = make_responses(pair, ids, uniform, warp, generation, lambda made, done: None)
    for (prompt, prompt_ids), response in zip(prompts, responses, strict=True):
        limit = min(most, pair.window - len(prompt_ids))
        draws = Draws.of(seed, prompt.prompt_id, settings.num_draws, len(response.ids), settings.max_tokens)
        row = record_response(pair, prompt_ids, response.ids, limit, warp, draws, settings)
        yield {"prompt_id": prompt.prompt_id, "prompt_ids": prompt_ids, **row}
        advance(1)


def _announce(folder: Path, num_prompts: int, num_tokens: int, settings: RecordSettings) -> None:
    nodes = num_prompts * num_tokens * (1 + settings.num_draws * settings.max_tokens)
    size, free = nodes * BYTES_PER_NODE / 2**20, shutil.disk_usage(folder).free / 2**20
    logger.info("recording: %d prompts, %d draws each, at most %.0f MiB, in %s", num_prompts, settings.num_draws, size, folder)
    if size > free:
        logger.warning("recording: only %.0f MiB are free there; paths.data= puts it elsewhere", free)


def judge(
    folder: Path, pair: Pair, heads: Mapping[str, AcceptanceHead], truth: bool, advance: Advance = lambda count: None
) -> None:
    """Add to the recording in `folder` what is missing of what `heads` (by fingerprint) and, if asked, the target say of its nodes.

    All heads that are missing share one pass of the draft. `advance` hears of every prompt once for the heads and once for the target,
    whether there was something to do or not.
    """
    manifest = read_manifest(folder)
    settings, num_rows = manifest["made_of"], sum(shard["rows"] for shard in manifest["shards"].values())
    with exclusive(folder):
        missing = {name: head for name, head in heads.items() if not _judged(folder, name).is_complete()}
        if missing:
            for head in missing.values():
                head.to(pair.draft_lm.device)
            _judge(folder, pair.draft_lm, list(missing), _HeadScores(pair.draft_lm, list(missing.values())), settings, advance)
        elif heads:
            advance(num_rows)
        if truth and not _judged(folder, TRUTH).is_complete():
            score = _TruthScores(pair.target_lm, Warp(**settings["warp"]))
            _judge(folder, pair.target_lm, [TRUTH], score, settings, advance)
        elif truth:
            advance(num_rows)


def _judged(folder: Path, name: str) -> ShardStore:
    return ShardStore(folder / "judges" / name, {"judge": name, "of": read_manifest(folder)["shards"]}, JUDGEMENTS)


def _judge(
    folder: Path, lm: LanguageModel, names: list[str], score: Callable, settings: Mapping[str, Any], advance: Advance
) -> None:
    """Write a shard of judgements for every shard of the recording."""
    stores = [_judged(folder, name) for name in names]
    shards = read_manifest(folder)["shards"]
    columns = ["prompt_ids", "response_ids", *(f"branch_{name}" for name in ("start", "length", "ids")), "law_prob"]
    for shard in sorted(shards):
        if all(store.has(shard) for store in stores):
            advance(shards[shard]["rows"])
            continue
        found: list[list[dict[str, Any]]] = [[] for _ in names]
        for row in pq.read_table(folder / shard, columns=columns).to_pylist():
            branches = _branches(row, settings["settings"]["max_tokens"])
            law_prob, parts, done = torch.tensor(row["law_prob"]), [], 0
            for tokens, hidden in node_states(
                lm, row["prompt_ids"], row["response_ids"], branches, settings["settings"]["batch_size"]
            ):
                parts.append(score(tokens, hidden, law_prob[done : done + len(tokens)]))
                done += len(tokens)
            for rows, values in zip(found, torch.cat(parts, dim=1).cpu(), strict=True):
                rows.append({"values": values.numpy()})
            advance(1)
        for store, rows in zip(stores, found, strict=True):
            store.write(shard, rows)
    for store in stores:
        store.complete(sorted(shards))


class _HeadScores:
    """Logits of several heads."""

    def __init__(self, lm: LanguageModel, heads: Sequence[AcceptanceHead]) -> None:
        self.lm, self.heads = lm, heads
        self.needs = frozenset(name for head in heads for name in head.config.inputs)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, hidden: Tensor, law_prob: Tensor) -> Tensor:
        """Return logits (heads, n) for tokens (n,) and the states (n, H) they come from."""
        pieces = torch.arange(len(tokens), device=tokens.device).split(max(1, SLICE_ELEMENTS // self.lm.vocab_size))
        found = []
        for piece in pieces:
            logits = self.lm.logits(hidden[piece]) if self.needs - {"hidden", "embedding", "token"} else hidden[piece]
            features = drafting_features(self.lm, self.needs, logits, tokens[piece], hidden[piece])
            found.append(torch.stack([head(features).float() for head in self.heads]))
        return torch.cat(found, dim=1)


class _TruthScores:
    """The chance that token verification accepts each node once all before it are accepted."""

    def __init__(self, lm: LanguageModel, warp: Warp) -> None:
        self.lm, self.warp = lm, warp

    @torch.no_grad()
    def __call__(self, tokens: Tensor, hidden: Tensor, law_prob: Tensor) -> Tensor:
        """Return probabilities (1, n); `law_prob` (n,) is the draft's."""
        found = []
        for piece in torch.arange(len(tokens), device=tokens.device).split(max(1, SLICE_ELEMENTS // self.lm.vocab_size)):
            law = self.warp(self.lm.logits(hidden[piece]))
            target_prob = law.gather(1, tokens[piece, None]).squeeze(1)
            found.append(accept_prob(target_prob, law_prob.to(target_prob.device)[piece].to(target_prob.dtype)).float())
        return torch.cat(found)[None]


def head_fingerprint(head: AcceptanceHead) -> str:
    """Return what tells two heads apart: what they compute from which inputs."""
    digest = hashlib.sha256(repr((head.config.judges, head.config.inputs)).encode())
    for value in head.state_dict().values():
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _branches(row: Mapping[str, Any], max_tokens: int) -> Branches:
    lengths = torch.tensor(row["branch_length"], dtype=torch.long)
    tokens = torch.zeros((len(lengths), max_tokens), dtype=torch.long)
    tokens[torch.arange(max_tokens) < lengths[:, None]] = torch.tensor(row["branch_ids"], dtype=torch.long)
    start = torch.tensor(row["branch_start"], dtype=torch.long)
    return Branches(torch.zeros_like(start), len(row["prompt_ids"]) + start, tokens, lengths)


def load_recording(folder: Path, judges: Sequence[str] = ()) -> Recording:
    """Return a complete recording, with what `judges` (fingerprints of heads, or TRUTH) say of its nodes."""
    manifest = read_manifest(folder)
    shards, settings = sorted(manifest["shards"]), manifest["made_of"]["settings"]
    table = pa.concat_tables([pq.read_table(folder / shard) for shard in shards])
    responses, branch_ids = _lists(table, "response_ids"), _lists(table, "branch_ids")
    lengths = np.array([len(response) for response in responses])
    first = np.concatenate([[0], lengths.cumsum()])
    nodes_before = first[-1] + np.concatenate([[0], np.cumsum([len(ids) for ids in branch_ids])])
    accepted = np.concatenate([flags.reshape(settings["num_draws"], -1) for flags in _lists(table, "accepted")], axis=1)
    branch_first, branch_length = (np.zeros(accepted.shape, dtype=np.int64) for _ in range(2))
    where = (_lists(table, f"branch_{name}") for name in ("draw", "start", "length"))
    for start, before, draw, position, length in zip(first, nodes_before, *where, strict=False):
        length = length.astype(np.int64)
        place = draw, start + position
        branch_first[place], branch_length[place] = before + length.cumsum() - length, length
    values = {name: _lists(table, name) for name in FEATURES}
    for name in judges:
        judged = pa.concat_tables([pq.read_table(folder / "judges" / name / shard) for shard in shards])
        values[name] = _lists(judged, "values")
    return Recording(
        prompt_ids=table.column("prompt_id").to_pylist(),
        prompts=[ids.tolist() for ids in _lists(table, "prompt_ids")],
        first=torch.from_numpy(first[:-1]),
        lengths=torch.from_numpy(lengths),
        limits=torch.tensor(table.column("limit").to_pylist()),
        finished=torch.tensor(table.column("finished").to_pylist()),
        accepted=torch.from_numpy(accepted),
        branch_first=torch.from_numpy(branch_first),
        branch_length=torch.from_numpy(branch_length),
        tokens=torch.from_numpy(np.concatenate([*responses, *branch_ids]).astype(np.int64)),
        features={name: _trunks_first(parts, lengths) for name, parts in values.items()},
        max_tokens=settings["max_tokens"],
    )


def _lists(table: pa.Table, name: str) -> list[np.ndarray]:
    """Return a column of lists as one array per row."""
    column = table.column(name).combine_chunks()
    return np.split(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()[1:-1])


def _trunks_first(parts: Sequence[np.ndarray], lengths: np.ndarray) -> Tensor:
    """Return values of all responses' nodes in a recording's order, given for each response its tokens' and then its branches'."""
    cut = list(zip(parts, lengths, strict=True))
    return torch.from_numpy(np.concatenate([part[:n] for part, n in cut] + [part[n:] for part, n in cut]).astype(np.float32))
