"""The target's laws along texts that stay the same, kept on disk: of each law the likeliest tokens and the mass of all others.

A draft is then compared on those tokens and on the rest as one outcome. Where the law was cut to as many tokens (top-k) nothing is lost.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specheads.errors import UserError, is_count, is_number
from specheads.padding import BATCH_TOKENS, SLICE_ELEMENTS, batches_of_tokens, right_padded, slices
from specheads.pair import LanguageModel
from specheads.storage.shards import fingerprint
from specheads.storage.tensor_shards import GIB, ShardReader, make_missing, packed, spans
from specheads.training.distill.distill_loss import LossSettings, kept
from specheads.training.distill.samples import Ragged, Responses

CHOICES = ("auto", "cached", "recomputed")


def check_target_probs(choice: Any, top_k: Any, budget_gib: Any) -> None:
    """Raise UserError for settings of the store that are none."""
    if choice not in CHOICES:
        raise UserError(f"target_probs.keep={choice} is not known; use one of {', '.join(CHOICES)}.")
    if not is_count(top_k, least=1):
        raise UserError(f"target_probs.top_k={top_k} is no count of at least 1; it is how many tokens of each law are kept.")
    if not is_number(budget_gib) or budget_gib < 0:
        raise UserError(
            f"target_probs.budget={budget_gib} is no number of at least 0; it is the largest size of the store in GiB."
        )


def fingerprint_of(prompts: Ragged, responses: Mapping[str, Responses]) -> str:
    """Return what identifies prompts and the responses to them that are known beforehand."""
    digest = hashlib.sha256(prompts.values.tobytes() + prompts.ends.tobytes())
    for kind, known in responses.items():
        digest.update(f"{kind} {[list(numbers) for numbers in known.of_prompt]}".encode())
        digest.update(known.tokens.values.tobytes() + known.tokens.ends.tobytes())
    return digest.hexdigest()[:16]


class TargetStore:
    """The laws along all responses of one kind."""

    def __init__(
        self,
        root: Path,
        target: LanguageModel,
        who: list[str],
        prompts: Ragged,
        responses: Responses,
        settings: LossSettings,
        top_k: int,
    ) -> None:
        """Plan the store; `who` is the target's id, revision and dtype."""
        self.target, self.prompts, self.responses, self.settings, self.top_k = target, prompts, responses, settings, top_k
        self.prompt_of = np.zeros(len(responses.tokens), dtype=np.int64)
        for row, numbers in enumerate(responses.of_prompt):
            self.prompt_of[list(numbers)] = row
        warp = settings.warp
        self.facts = {
            "laws_of": who,
            "texts": fingerprint_of(prompts, {"": responses}),
            "law": [warp.temperature, warp.top_k, warp.top_p, min(top_k, target.vocab_size)],
        }
        self.root, self.folder = root, root / "laws" / fingerprint(self.facts)
        self.parts = {f"{first:08d}.safetensors": (first, count) for first, count in spans(self.sizes)}
        self.firsts = np.array([first for first, _ in self.parts.values()])
        self.reader = ShardReader(self.folder)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"target": None}  # what reads the store in a process of a loader does not make it

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each response: an id and a log-probability per kept token, and the rest."""
        return self.responses.tokens.lengths * (6 * min(self.top_k, self.target.vocab_size) + 2)

    def bytes(self) -> int:
        """Return the size of the whole store."""
        return int(self.sizes.sum())

    def is_wanted(self, choice: str, budget_gib: float, num_reads: int) -> bool:
        """Return whether to keep the laws: `auto` does where they are read more than once and are within the budget and the disk.

        Raises:
            UserError: `cached` where they would be larger than the budget or the disk.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        size, free = self.bytes() / GIB, shutil.disk_usage(self.root).free / GIB
        there = sum(path.stat().st_size for path in self.folder.glob("*.safetensors")) / GIB
        fits = size <= budget_gib and size - there <= free
        if choice == "cached" and not fits:
            raise UserError(
                f"target_probs.keep=cached would take {size:.1f} GiB, but target_probs.budget={budget_gib:g} and {self.root} has "
                f"{free:.1f} GiB free; raise the budget, keep fewer tokens (target_probs.top_k), or use target_probs.keep=recomputed."
            )
        return choice == "cached" or (choice == "auto" and fits and num_reads > 1)

    def make(self) -> None:
        """Compute what is missing."""
        num_rows = {name: count for name, (_, count) in self.parts.items()}
        make_missing(self.folder, self.facts, num_rows, self._computed, "the target's laws", self.bytes() / GIB)

    @torch.no_grad()
    def _computed(self, name: str) -> dict[str, Tensor]:
        first, count = self.parts[name]
        rows: list[dict[str, Tensor]] = [{} for _ in range(count)]
        texts = [np.concatenate([self.prompts[self.prompt_of[n]], self.responses.tokens[n]]) for n in range(first, first + count)]
        starts = [len(self.prompts[self.prompt_of[n]]) for n in range(first, first + count)]
        for numbers in batches_of_tokens([len(text) for text in texts], BATCH_TOKENS):
            tokens, judged = padded([texts[row] for row in numbers], [starts[row] for row in numbers])
            hidden = self.target.hidden_states(tokens.to(self.target.device), use_cache=False)[judged.to(self.target.device)]
            pieces = slices(len(hidden), self.target.vocab_size, SLICE_ELEMENTS)
            distributions = [kept(self.settings.log_target(self.target.logits(hidden[piece])), self.top_k) for piece in pieces]
            counts = judged.sum(dim=1).tolist()
            ids, log_probs = (
                torch.cat([distribution.ids for distribution in distributions]).int(),
                torch.cat([distribution.log_probs for distribution in distributions]).half(),
            )
            columns = ids.cpu().split(counts), log_probs.cpu().split(counts)
            for row, own_ids, own_log_probs in zip(numbers, *columns, strict=True):
                rows[row] = {"ids": own_ids, "log_probs": own_log_probs}
        return packed(rows)

    def __getitem__(self, number: int) -> Mapping[str, Tensor]:
        """Return `ids` (R, k) int32 and `log_probs` (R, k + 1) half of a response."""
        place = int(np.searchsorted(self.firsts, number, side="right")) - 1
        first = int(self.firsts[place])
        return self.reader.row(f"{first:08d}.safetensors", number - first)


def padded(texts: list[np.ndarray], starts: list[int]) -> tuple[Tensor, Tensor]:
    """Return texts (B, T) with zeros behind their ends, and where the states lie (B, T) bool that their tokens from `starts` on come from."""
    tokens = right_padded(texts)
    judged = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        judged[row, start - 1 : len(text) - 1] = True
    return tokens, judged
