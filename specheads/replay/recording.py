"""Recordings on disk and in memory: Parquet shards of `record_responses` in
`recordings/<fingerprint>/` of the data folder.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from specheads.decoding.branches import LOGITS_ELEMENTS, Branches
from specheads.decoding.engine import bulk_operations
from specheads.decoding.responses import Responder, row_uniforms
from specheads.errors import UserError
from specheads.heads.calibration import Indices
from specheads.heads.features import RECORDED
from specheads.load import threads_by_load
from specheads.pair.needs import memory_of, memory_parts, memory_to_read
from specheads.pair.padding import BATCH_TOKENS, batches_of_tokens
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, computing_with, naming_rows
from specheads.progress import Advance, progress
from specheads.prompts.prompt import EncodedPrompt, ResponseLimits, response_provenance
from specheads.replay.chains import record_chains
from specheads.replay.response_tree import (
    COLUMNS,
    RecordSettings,
    ResponseToRecord,
    record_responses,
)
from specheads.storage.shards import ShardStore, fingerprint, made_manifest

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
ROWS_PER_SHARD = 8  # a restart repeats at most one shard, and none of the responses
RESPONSES = "responses"  # the journal of a recording in the making
SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "prompt_ids": pa.list_(pa.int32()),
        "response_ids": pa.list_(pa.int32()),
        "limit": pa.int32(),  # number of tokens at which the response would have ended
        "finished": pa.bool_(),  # whether it ended with an end-of-sequence token
        # (Q, N), whether a token came from an accepted draft token
        "accepted": pa.list_(pa.bool_()),
        # The sample and the position that each branch belongs to, and its number of tokens
        "branch_draw": pa.list_(pa.int16()),
        "branch_start": pa.list_(pa.int32()),
        "branch_length": pa.list_(pa.int16()),
        "branch_ids": pa.list_(pa.int32()),  # one branch after another
        # one for every node: the response's tokens, then the branches'
        **dict.fromkeys(COLUMNS, pa.list_(pa.float32())),
    }
)
# Where each branch is a whole draft: how many of its first tokens are accepted
CHAIN_SCHEMA = SCHEMA.append(pa.field("branch_accepted", pa.list_(pa.int16())))
GROUND_TRUTH = "ground_truth"  # the predictor that knows the acceptance probabilities


@dataclass(frozen=True)
class Recording:
    """Recorded responses, flat: P of them with N tokens in all, which are the first N nodes.

    Then the nodes of all branches.

    Each of Q samples has at each position an accepted token or a branch of nodes, none where
    decoding would not have drafted. Where drafts depend on where their round began, it has a branch
    at each position that is the whole draft from there; the response's own nodes are then empty.
    """

    prompts: list[list[int]]
    first: Tensor  # (P,) long, each response's first node
    lengths: Tensor  # (P,) long, its tokens
    limits: Tensor  # (P,) long, tokens at which it would have ended
    finished: Tensor  # (P,) bool, whether an end-of-sequence token ended it
    accepted: Tensor  # (Q, N) bool
    branch_first: Tensor  # (Q, N) long, a branch's first node
    branch_length: Tensor  # (Q, N) long
    tokens: Tensor  # (nodes,) long
    # (nodes,) each: the features of a node, and by name the predictions for it
    features: dict[str, Tensor]
    max_tokens: int  # the longest draft that can be replayed
    # (Q, N) long, how many of the first tokens of a branch that is a whole draft are accepted;
    # None: branches begin with a rejected token
    branch_accepted: Tensor | None = None

    @property
    def num_samples(self) -> int:
        return len(self.accepted)

    @property
    def num_prompts(self) -> int:
        return len(self.prompts)

    def response(self, number: int) -> list[int]:
        start = int(self.first[number])
        return self.tokens[start : start + int(self.lengths[number])].tolist()

    def prompt_of(self, node: Tensor) -> Tensor:
        """Return the response number (n,) of each node (n,).

        Branches are stored in the order of their responses.
        """
        branches = self.branch_length.sum(0).cumsum(0)[self.first + self.lengths - 1]
        ends = torch.cat([self.first + self.lengths, self.accepted.shape[1] + branches])
        return torch.searchsorted(ends, node, right=True) % self.num_prompts

    def drafts(self) -> "Drafts":
        """Return the longest draft from every position of every sample (Q N,), one sample after
        another.
        """
        num_tokens = self.accepted.shape[1]
        position = torch.arange(num_tokens)
        ends = (self.first + self.lengths).repeat_interleave(self.lengths)
        limits = (self.first + self.limits).repeat_interleave(self.lengths)
        if self.branch_accepted is not None:
            first = branch = self.branch_first
            num_accepted = self.branch_accepted
            most = self.branch_length
        else:
            first = position
            # The first position from each on that is rejected, or the response's end.
            rejected = torch.where(self.accepted, num_tokens, position)
            rejected = rejected.flip(1).cummin(dim=1).values.flip(1).minimum(ends)
            num_accepted = rejected - position
            place = rejected.clamp_max(num_tokens - 1)
            in_branch = self.branch_length.gather(1, place)
            most = num_accepted + torch.where(rejected < ends, in_branch, 0)
            most = most.minimum(limits - 1 - position)
            branch = self.branch_first.gather(1, place) - num_accepted
        columns = (first, num_accepted, branch, most, ends - position)
        return Drafts(*(column.expand_as(most).flatten() for column in columns))

    def labels(self) -> "LabelledTokens":
        """Return the tokens that the draft proposes after accepted ones, at every position of every
        sample.
        """
        if self.branch_accepted is not None:
            return self._labels_of_chains()
        branched = self.branch_length > 0
        position = torch.arange(self.accepted.shape[1]).expand_as(self.accepted)
        ends = self.first + self.lengths - 1
        last, undrafted = torch.zeros((2, self.accepted.shape[1]), dtype=torch.bool)
        last[ends] = True
        undrafted[ends[self.lengths == self.limits]] = (
            True  # it is the target's, even where the draft would agree
        )
        known = (self.accepted & ~undrafted) | branched
        node = torch.where(self.accepted, position, self.branch_first)
        after = torch.where(
            self.accepted,
            torch.where(last, -1, position + 1),
            torch.where(self.branch_length > 1, node + 1, -1),
        )
        # As many accepted tokens as are right before a position, a round can have drafted there.
        furthest = _accepted_before(self.accepted, self.first).clamp_max(self.max_tokens - 1)
        tokens = LabelledTokens(node, after, self.accepted, Indices.up_to(furthest))
        return tokens.chosen(known)

    def _labels_of_chains(self) -> "LabelledTokens":
        drafts = self.drafts()
        # As far as the first rejected token
        counts = (drafts.num_accepted + 1).minimum(drafts.most)
        row = torch.arange(len(counts)).repeat_interleave(counts)
        index = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        node = drafts.first[row] + index
        after = torch.where(index + 1 < drafts.most[row], node + 1, -1)
        accepted = index < drafts.num_accepted[row]
        return LabelledTokens(node, after, accepted, Indices(index, index))


class Drafts(NamedTuple):
    """The longest draft from each start, (n,) long: the response's tokens from there on while they
    are accepted, and then the branch.
    """

    first: Tensor  # the node of its first token, if that is accepted
    num_accepted: Tensor
    branch: Tensor  # the node of its first token in the branch, less the accepted tokens
    most: Tensor  # its tokens
    left: Tensor  # tokens of the response that are left, which the target emits or accepts

    def node(self, index: int | Tensor) -> Tensor:
        """Return the nodes (n,) of the drafts' tokens at an index, or at one (n,) each."""
        return index + torch.where(index < self.num_accepted, self.first, self.branch)


class LabelledTokens(NamedTuple):
    """Drafted tokens (n,) of which it is known whether they are accepted."""

    node: Tensor
    after: Tensor  # the nodes of the tokens that the draft proposes after them; -1: none recorded
    accepted: Tensor
    indices: Indices

    def chosen(self, which: Tensor) -> "LabelledTokens":
        """Return those tokens of which `which` (n,) bool is true."""
        chosen: LabelledTokens = tree_map(lambda column: column[which], self)
        return chosen


def _accepted_before(accepted: Tensor, first: Tensor) -> Tensor:
    """Return how many accepted tokens are right before each position (Q, N), of responses that
    begin at `first` (P,).
    """
    position = torch.arange(accepted.shape[1])
    start = torch.zeros_like(accepted, dtype=torch.long)  # the start of the run of accepted tokens
    start[:, 1:] = torch.where(accepted[:, :-1], 0, position[1:])
    start[:, first] = first
    return position - start.cummax(dim=1).values


@dataclass
class _PlannedSet:
    """A set of prompts and its recording, some shards of which may be missing."""

    store: ShardStore
    prompts: Sequence[EncodedPrompt]
    shards: Mapping[str, range]  # the numbers of their prompts
    missing: Sequence[str] = ()

    @property
    def numbers(self) -> list[int]:
        """The numbers of the prompts in missing shards."""
        numbers = list[int]()
        for name in self.missing:
            numbers += self.shards[name]
        return numbers


@dataclass(frozen=True)
class Recorder:
    """How prompts are recorded: everything that decides a recording but the prompts and the
    heads.
    """

    pair: Pair
    warp: Warp
    limits: ResponseLimits
    settings: RecordSettings
    seed: int
    folder: Path  # it holds all recordings

    def record(self, sets: Sequence[Sequence[EncodedPrompt]]) -> list[Path]:
        """Return the folder of the complete recording of each set of prompts, which is made or
        finished first if necessary.
        """
        folders = list[Path]()
        wanted: dict[Path, _PlannedSet] = {}
        for prompts in sets:
            store = self._store(prompts)
            folders.append(store.folder)
            wanted[store.folder] = _PlannedSet(store, prompts, _shards_of(len(prompts)))
        unfinished = list[_PlannedSet]()
        with ExitStack() as stack:
            # In the same order in all processes, so that none of them waits for another in turn.
            for folder in sorted(wanted):
                each = wanted[folder]
                if each.store.is_complete():
                    continue
                logger.info(
                    "recording: %d prompts, %d samples each, in %s",
                    len(each.prompts),
                    self._settings.num_samples,
                    folder,
                )
                each.missing = stack.enter_context(each.store.missing(list(each.shards)))
                unfinished.append(each)
            if unfinished:
                self._make(unfinished)
        return folders

    def _store(self, prompts: Sequence[EncodedPrompt]) -> ShardStore:
        of_prompts = [prompt for prompt, _ in prompts]
        provenance = response_provenance(self.pair, of_prompts, self.warp, self.seed) | {
            "generation": [self.limits.max_new_tokens, self.limits.batch_size],
            "settings": asdict(self._settings),
            "recording": FORMAT_VERSION,
        }
        schema = SCHEMA
        if self.pair.draft_lm.reads_layers:
            provenance["chains"] = True
            schema = CHAIN_SCHEMA
        return ShardStore(self.folder / "recordings" / fingerprint(provenance), provenance, schema)

    @property
    def _settings(self) -> RecordSettings:
        return replace(self.settings, num_samples=1) if self.warp.greedy else self.settings

    def _make(self, unfinished: Sequence[_PlannedSet]) -> None:
        """Record what is missing of some sets.

        Responses come first, as their tokens tell how long recording takes.
        """
        draft = self.pair.draft_lm
        prompt_lengths = list[int]()
        for each in unfinished:
            prompt_lengths += [len(ids) for _, ids in each.prompts]
        responder = Responder(self.pair, prompt_lengths, self.limits)
        # As much memory as a batch of branches of the longest text takes.
        num_positions = self.limits.batch_size * (responder.capacity + self._settings.max_tokens)
        rows = num_positions / responder.capacity
        branches = memory_parts(
            draft, num_positions + BATCH_TOKENS, rows=rows, most=LOGITS_ELEMENTS
        )
        # None where the draft reads alone
        of_target = memory_to_read(self.pair.target_lm, draft, num_steps=1)[1:]
        memory = memory_of("recording", draft, responder.memory(), branches, *of_target)
        logger.info("recording: %s", memory)
        in_bulk = bulk_operations(draft.device)
        with computing_with(in_bulk):
            responses = self._respond(responder, unfinished)
        num_tokens = 0
        for made in responses:
            num_tokens += sum(len(response) for response in made.values())
        with (
            computing_with(in_bulk),
            threads_by_load(),
            progress("drafts", num_tokens) as advance,
        ):
            for each, made in zip(unfinished, responses, strict=True):
                each.store.announce("recording", [len(each.shards[name]) for name in each.missing])
                for name in each.missing:
                    numbers = each.shards[name]
                    prompts = [each.prompts[number] for number in numbers]
                    texts = [made[number] for number in numbers]
                    each.store.write(name, self._rows(prompts, texts, num_positions, advance))
                each.store.complete(list(each.shards))
                each.store.journal(RESPONSES).unlink(missing_ok=True)

    def _respond(
        self, responder: Responder, unfinished: Sequence[_PlannedSet]
    ) -> list[dict[int, list[int]]]:
        """Return the ids of the missing responses of each set, by the prompts' numbers."""
        most = self.limits.max_new_tokens
        responses = list[dict[int, list[int]]]()
        num_later = sum(len(each.numbers) for each in unfinished)
        with progress("responses", num_later * most) as advance:
            for each in unfinished:
                prompt_ids = list[Sequence[int]]()
                uniform = list[np.ndarray]()
                for number in each.numbers:
                    prompt, ids = each.prompts[number]
                    prompt_ids.append(ids)
                    uniform.append(row_uniforms(self.seed, prompt.prompt_id, most)[0])
                num_later -= len(prompt_ids)
                made = responder.respond(
                    prompt_ids,
                    np.array(uniform),
                    self.warp,
                    advance,
                    each.store.journal(RESPONSES),
                    num_later,
                )
                of_set = dict[int, list[int]]()
                for number, response in zip(each.numbers, made, strict=True):
                    if response.failure is not None:
                        place = each.prompts[number][0].where
                        raise UserError(f"{place} cannot be recorded: {response.failure}")
                    of_set[number] = response.ids
                responses.append(of_set)
        return responses

    def _rows(
        self,
        prompts: Sequence[EncodedPrompt],
        responses: Sequence[list[int]],
        num_positions: int,
        advance: Advance,
    ) -> list[dict[str, object]]:
        """Return the rows of one shard. `advance` takes tokens of responses."""
        texts = list[ResponseToRecord]()
        for (prompt, ids), response in zip(prompts, responses, strict=True):
            limit = min(self.limits.max_new_tokens, self.pair.window - len(ids))
            texts.append(
                ResponseToRecord.of(
                    ids, response, limit, self._settings, self.seed, prompt.prompt_id
                )
            )
        columns = dict[int, dict[str, object]]()  # by the row's number
        recorded = record_chains if self.pair.draft_lm.reads_layers else record_responses

        def record(batch: Sequence[int]) -> list[dict[str, object]]:
            of_batch = [texts[row] for row in batch]
            return recorded(self.pair, of_batch, self.warp, num_positions, advance)

        for batch in batches_of_tokens([len(text.read) for text in texts], BATCH_TOKENS):
            made = naming_rows(record, batch, lambda row: prompts[row][0].where)
            columns |= zip(batch, made, strict=True)
        rows = list[dict[str, object]]()
        for row, (prompt, ids) in enumerate(prompts):
            rows.append({"prompt_id": prompt.prompt_id, "prompt_ids": ids, **columns[row]})
        return rows


def _shards_of(num_prompts: int) -> dict[str, range]:
    """Return the numbers of the prompts in each shard, by its name."""
    shards = dict[str, range]()
    for start in range(0, num_prompts, ROWS_PER_SHARD):
        numbers = range(start, min(start + ROWS_PER_SHARD, num_prompts))
        shards[f"{start:06d}-{ROWS_PER_SHARD}.parquet"] = numbers
    return shards


class StoredResponse(TypedDict):
    """The columns of a stored response that predictors read; see SCHEMA."""

    prompt_ids: list[int]
    response_ids: list[int]
    branch_start: list[int]
    branch_length: list[int]
    branch_ids: list[int]
    draft_prob: list[float]
    max_prob: list[float]
    entropy: list[float]
    law_prob: list[float]
    branch_accepted: NotRequired[list[int]]  # where branches are whole drafts


def branches_of(row: StoredResponse, max_tokens: int) -> Branches:
    """Return the branches of a stored response."""
    lengths = torch.tensor(row["branch_length"], dtype=torch.long)
    tokens = torch.zeros((len(lengths), max_tokens), dtype=torch.long)
    tokens[torch.arange(max_tokens) < lengths[:, None]] = torch.tensor(
        row["branch_ids"], dtype=torch.long
    )
    start = torch.tensor(row["branch_start"], dtype=torch.long)
    return Branches(torch.zeros_like(start), len(row["prompt_ids"]) + start, tokens, lengths)


def load_recording(folder: Path, predictors: Sequence[str] = ()) -> Recording:
    """Return a complete recording with the predictions of `predictors` (fingerprints of heads, or
    GROUND_TRUTH).
    """
    manifest = made_manifest(folder)
    shards = sorted(manifest["shards"])
    settings = manifest["provenance"]["settings"]
    table = _read_shards(folder, shards)
    responses = _lists(table, "response_ids")
    branch_ids = _lists(table, "branch_ids")
    lengths = np.array([len(response) for response in responses])
    first = np.concatenate([[0], lengths.cumsum()])
    num_branch_nodes = np.cumsum([len(ids) for ids in branch_ids])
    nodes_before = first[-1] + np.concatenate([[0], num_branch_nodes])
    flags = [each.reshape(settings["num_samples"], -1) for each in _lists(table, "accepted")]
    accepted = np.concatenate(flags, axis=1)
    branch_first = np.zeros(accepted.shape, dtype=np.int64)
    branch_length = np.zeros(accepted.shape, dtype=np.int64)
    branch_accepted = np.zeros(accepted.shape, dtype=np.int64)
    are_chains = "branch_accepted" in table.column_names
    samples = _lists(table, "branch_draw")
    positions = _lists(table, "branch_start")
    branch_lengths = _lists(table, "branch_length")
    for number in range(len(responses)):
        length = branch_lengths[number].astype(np.int64)
        place = samples[number], first[number] + positions[number]
        branch_first[place] = nodes_before[number] + length.cumsum() - length
        branch_length[place] = length
        if are_chains:
            branch_accepted[place] = table.column("branch_accepted")[number].values.to_numpy()
    columns = {name: _lists(table, name) for name in RECORDED}
    for name in predictors:
        columns[name] = _lists(_read_shards(folder / "predictions" / name, shards), "values")
    features = dict[str, Tensor]()
    for name, parts in columns.items():
        if are_chains:  # there are none of the responses' own nodes
            features[name] = _joined([np.zeros(first[-1]), *parts])
            continue
        of_responses = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        of_branches = [part[length:] for part, length in zip(parts, lengths, strict=True)]
        features[name] = _joined([*of_responses, *of_branches])
    return Recording(
        prompts=[ids.tolist() for ids in _lists(table, "prompt_ids")],
        first=torch.from_numpy(first[:-1]),
        lengths=torch.from_numpy(lengths),
        limits=torch.tensor(table.column("limit").to_pylist()),
        finished=torch.tensor(table.column("finished").to_pylist()),
        accepted=torch.from_numpy(accepted),
        branch_first=torch.from_numpy(branch_first),
        branch_length=torch.from_numpy(branch_length),
        tokens=torch.from_numpy(np.concatenate([*responses, *branch_ids]).astype(np.int64)),
        features=features,
        max_tokens=settings["max_tokens"],
        branch_accepted=torch.from_numpy(branch_accepted) if are_chains else None,
    )


def _read_shards(folder: Path, shards: Sequence[str]) -> pa.Table:
    return pa.concat_tables([pq.read_table(folder / shard) for shard in shards])


def _lists(table: pa.Table, name: str) -> list[np.ndarray]:
    """Return a column of lists as one array per row."""
    column = table.column(name).combine_chunks()
    return np.split(column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()[1:-1])


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))
