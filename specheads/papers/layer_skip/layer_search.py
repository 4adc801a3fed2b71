"""`specheads papers layer_search`: choose the layers that the target skips when it drafts for itself.

Layers are removed one after another; each time the layer without which decoding is fastest. The target responds to dev
prompts. A draft's acceptance is the overlap of its distributions with the target's along these responses; its cost is the share
of the weights that it still reads. Both determine the speed at the best fixed length (Leviathan et al. 2023, theorem 3.8).

Source: Draft & Verify (Zhang et al. 2023) searches such a set by Bayesian optimisation of measured time.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from specheads.decoding.decoder import Baseline
from specheads.evaluation.settings import EngineName
from specheads.forecast import progress
from specheads.pair.language_model import LanguageModel
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, check_finite
from specheads.papers.layer_skip.layer_skip import layers_of, without_layers
from specheads.prompts.encoding import EncodedPrompt
from specheads.settings import Built, OpenProbability, PositiveCount, Seed, Settings, setting
from specheads.storage.journal import Journal
from specheads.storage.runs import is_resumed

logger = logging.getLogger(__name__)

Text = tuple[Sequence[int], Tensor]  # the tokens of a prompt and of the response to it


class LayerSearch(Settings):
    """Settings of `specheads papers layer_search`."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(Warp(top_k=50), "how draft and target turn logits into probabilities")
    num_dev_prompts: PositiveCount = setting(8, "dev prompts that the target answers; drafts are compared along its responses")
    max_new_tokens: PositiveCount = setting(512, "longest response, in tokens", config="${data.max_new_tokens}")
    most_skipped: OpenProbability = setting(0.7, "largest share of the target's layers to leave out")
    max_tokens: PositiveCount = setting(20, "longest draft to consider, in tokens")
    engine: EngineName = setting("auto", "how the target answers: auto (the fastest here), eager, compiled or cuda_graph")


@dataclass(frozen=True)
class SkippedLayers:
    """A set of layers to skip, and the speed of the draft without them."""

    skipped: tuple[int, ...]
    acceptance: float  # mean overlap with the target's distributions
    cost: float  # of a forward pass of the draft, as a share of one of the target
    length: int  # the best fixed length
    speedup: float  # with drafts of that length


def best_length(acceptance: float, cost: float, most: int) -> tuple[int, float]:
    """Return the fixed length up to `most` at which speculative decoding is fastest, and its speed over the target alone.

    Tokens are assumed to be accepted independently, with probability `acceptance`; `cost` is that of a forward pass of the
    draft, as a share of one of the target.
    """
    speeds = [sum(acceptance**i for i in range(k + 1)) / (k * cost + 1) for k in range(most + 1)]
    length = max(range(1, most + 1), key=lambda k: speeds[k])
    return length, speeds[length]


def cost_without(pair: Pair, skipped: Sequence[int]) -> float:
    """Return the share of the weights that a forward pass reads without some layers."""
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers_of(pair.target)]
    total = sum(sizes) + pair.target_lm.output_embedding.weight.numel()
    return 1 - sum(sizes[layer] for layer in skipped) / total


@torch.no_grad()
def distributions_along(lm: LanguageModel, texts: Sequence[Text], warp: Warp) -> Iterator[Tensor]:
    """Yield the distributions (N, V) of the tokens of every response after its prompt."""
    for prompt, response in texts:
        tokens = torch.cat([torch.tensor(prompt), response])[None].to(lm.device)
        hidden = lm.hidden_states(tokens[:, :-1], use_cache=False)[0, len(prompt) - 1 :]
        probs = warp(lm.logits(hidden))
        check_finite(lm.name, probs)
        yield probs


def search(pair: Pair, prompts: Sequence[EncodedPrompt], settings: LayerSearch, run: Path) -> list[SkippedLayers]:
    """Return the best set of every size that was reached, the best of all first; `run` keeps a journal of what was tried."""
    num_layers = len(layers_of(pair.target))
    most = max(1, int(settings.most_skipped * num_layers))
    num_drafts = sum(num_layers - size for size in range(most))
    logger.info("%d of %d layers at most, %d drafts to try on %d dev prompts", most, num_layers, num_drafts, len(prompts))
    decoder = Baseline(pair, settings.warp, settings.engine)
    texts = [(ids, decoder.generate(ids, settings.max_new_tokens, seed=number).tokens) for number, (_, ids) in enumerate(prompts)]
    # On the CPU: next to a large target there is no memory for them.
    targets = [distribution.cpu() for distribution in distributions_along(pair.target_lm, texts, settings.warp)]
    journal = _journal(pair, texts, settings, run)
    best: list[SkippedLayers] = []
    with progress("searching", num_drafts) as advance:
        number = 0
        for _ in range(most):
            skipped, tried = best[-1].skipped if best else (), []
            for layer in sorted({*range(num_layers)} - {*skipped}):
                candidate = tuple(sorted((*skipped, layer)))
                if number not in journal.entries:
                    overlap = _mean_overlap(pair, candidate, texts, targets, settings.warp)
                    journal.add(number, {"acceptance": overlap})
                acceptance, cost = journal.entries[number]["acceptance"], cost_without(pair, candidate)
                tried.append(SkippedLayers(candidate, acceptance, cost, *best_length(acceptance, cost, settings.max_tokens)))
                number += 1
                advance(1)
            best.append(max(tried, key=lambda layers: (layers.speedup, layers.acceptance)))
    return sorted(best, key=lambda layers: -layers.speedup)


def _mean_overlap(pair: Pair, skipped: Sequence[int], texts: Sequence[Text], targets: Sequence[Tensor], warp: Warp) -> float:
    """Return the mean overlap with the target's distributions, along its responses, of the target without some layers."""
    lm = LanguageModel(without_layers(pair.target, skipped), pair.vocab_size)
    drafts = distributions_along(lm, texts, warp)
    overlap = [torch.minimum(target.to(draft.device), draft).sum(dim=1) for target, draft in zip(targets, drafts, strict=True)]
    return torch.cat(overlap).mean().item()


def _journal(pair: Pair, texts: Sequence[Text], settings: LayerSearch, run: Path) -> Journal:
    path = run / "candidates.jsonl"
    if not is_resumed(run):
        path.unlink(missing_ok=True)
    provenance = {"target": pair.target_revision, "dtype": str(pair.target.dtype), "warp": asdict(settings.warp)}
    return Journal(path, provenance | {"texts": [ids for ids, _ in texts], "seed": settings.seed})


def print_sets(sets: Sequence[SkippedLayers], console: Console | None = None) -> None:
    """Print a row for each set of layers."""
    table = Table("skipped layers")
    for column in ("acceptance", "cost", "length", "speed-up"):
        table.add_column(column, justify="right")
    for layers in sets:
        skipped = ", ".join(map(str, layers.skipped))
        table.add_row(skipped, f"{layers.acceptance:.3f}", f"{layers.cost:.3f}", f"{layers.length}", f"{layers.speedup:.2f}x")
    (console or Console()).print(table)
