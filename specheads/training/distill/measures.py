"""How good a draft is for its target: overlap, KL, agreement along the target's responses, and the tokens that a round yields."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.stopping import FixedLength
from specheads.padding import SLICE_ELEMENTS, slices
from specheads.pair import Pair
from specheads.sampling import Warp, overlap
from specheads.training.distill.divergences import forward_kl
from specheads.training.distill.sample_batch import Texts
from specheads.training.distill.samples import Answered, Sample

BLOCK = 4  # drafted tokens per round of the block efficiencies that are watched


@dataclass(frozen=True)
class LiveSettings:
    """What is decoded at every validation: so many dev prompts, each for so many tokens."""

    num_prompts: int = 4
    max_new_tokens: int = 64


def block_efficiency(overlap: float, num_tokens: int = BLOCK) -> float:
    """Return the tokens that a round of `num_tokens` drafted ones yields where each is accepted with this chance (Leviathan et al. 2023)."""
    return sum(overlap**count for count in range(num_tokens + 1))


@torch.no_grad()
def sums_of(pair: Pair, samples: Sequence[Sample], warp: Warp, device: torch.device) -> Tensor:
    """Return (4,) sums over the tokens of the target's responses: overlap under `warp`, KL(t || d), same likeliest token, their number."""
    texts, models = Texts.of(samples, device), (pair.target_lm, pair.draft_lm)
    states = [texts.states(lm) for lm in models]
    sums = torch.zeros(4, dtype=torch.float64)
    for piece in slices(len(states[0]), pair.vocab_size, SLICE_ELEMENTS):
        logits = [lm.logits(hidden[piece]).to(device) for lm, hidden in zip(models, states, strict=True)]
        most_likely = [own.argmax(-1) for own in logits]
        parts = (
            overlap(*map(warp, logits)).sum(),
            forward_kl(*(own.log_softmax(-1) for own in logits)).sum(),
            (most_likely[0] == most_likely[1]).sum(),
        )
        sums += torch.tensor([*(part.item() for part in parts), len(logits[0])], dtype=torch.float64)
    return sums.to(device, torch.float32 if device.type == "mps" else torch.float64)


def named_measures(sums: Tensor) -> dict[str, float]:
    """Return the measures that sums (4,) come to."""
    share, divergence, agreement = (sums[:3] / sums[3]).tolist()
    return {"overlap": share, "kl": divergence, "agreement": agreement, f"block_efficiency_{BLOCK}": block_efficiency(share)}


def measured(pair: Pair, rows: Answered, warp: Warp, batch_size: int) -> dict[str, float]:
    """Return the measures of a pair's draft, as it is, on all rows."""
    device, was_training = pair.draft_lm.device, pair.draft.training
    pair.draft.eval()
    keys = [(0, row) for row in range(len(rows))]
    batches = [keys[first : first + batch_size] for first in range(0, len(keys), batch_size)]
    sums = sum(sums_of(pair, [rows[key] for key in batch], warp, device) for batch in batches)
    pair.draft.train(was_training)
    return named_measures(sums)


@torch.no_grad()
def live_measures(pair: Pair, rows: Answered, warp: Warp, live: LiveSettings) -> dict[str, float]:
    """Return the block efficiency of decoding some prompts with drafts of BLOCK tokens; nothing where there are none."""
    prompts = [rows[0, row].prompt.tolist() for row in range(min(live.num_prompts, len(rows)))]
    if not prompts:
        return {}
    was_training = pair.draft.training
    pair.draft.eval()
    decoder = SpeculativeDecoder(pair, stopping=FixedLength(BLOCK), warp=warp, engine="eager")
    stats = [decoder.generate(prompt, live.max_new_tokens, seed=number).stats for number, prompt in enumerate(prompts)]
    pair.draft.train(was_training)
    calls = sum(each.num_target_calls for each in stats)
    return {f"live_block_efficiency_{BLOCK}": sum(each.num_tokens for each in stats) / calls}
