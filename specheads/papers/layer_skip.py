"""Draft & Verify (Zhang et al. 2023): the target drafts for itself, without some of its layers.

`specheads papers layer_search` chooses these, one after another: each time the layer without which decoding is fastest. A draft's
acceptance is the overlap of its distributions with the target's along responses to dev prompts; its cost is the share of the
weights that it still reads. Both determine the speed at the best fixed length (Leviathan et al. 2023, theorem 3.8). The authors
search by Bayesian optimisation of measured time.
"""

import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import PreTrainedModel

from specheads.decoding.decoder import Baseline
from specheads.decoding.drafting import Autoregressive
from specheads.decoding.stopping import MAX_TOKENS
from specheads.errors import UserError, is_count
from specheads.evaluation.settings import EngineName
from specheads.forecast import progress
from specheads.pair.language_model import LanguageModel, place_of_layers
from specheads.pair.pair import Pair
from specheads.pair.sampling import Warp, check_finite, overlap
from specheads.prompts.prompt import EncodedPrompt
from specheads.settings import Built, OpenProbability, PositiveCount, Seed, Settings, setting
from specheads.storage.journal import Journal
from specheads.storage.runs import is_resumed

logger = logging.getLogger(__name__)


class LayerSkip(Autoregressive):
    """`drafting=layer_skip`: chains of the target with the layers `skipped` left out; the pair's draft is not run.

    Args:
        skipped: numbers of layers, from 0.

    Source: Zhang et al. 2023 (Draft & Verify), section 3.
    """

    def __init__(self, skipped: Sequence[int]) -> None:
        if isinstance(skipped, str) or not isinstance(skipped, Sequence) or not all(is_count(layer) for layer in skipped):
            raise UserError(
                f"drafting.skipped={skipped} must be a list of layer numbers from 0, for example 'drafting.skipped=[2,3]', or "
                "let specheads papers layer_search look for them."
            )
        if len(set(skipped)) < len(skipped) or not len(skipped):
            raise UserError(f"drafting.skipped={list(skipped)} must name at least one layer, and each layer once.")
        self.skipped = tuple(sorted(skipped))

    def pair(self, pair: Pair) -> Pair:
        """Return the pair whose draft is the target without these layers; raises UserError for layers that it does not have."""
        name = f"{pair.target_id} without layers {', '.join(map(str, self.skipped))}"
        revision = f"{pair.target_revision}-{'-'.join(map(str, self.skipped))}"
        return replace(pair, draft=without_layers(pair.target, self.skipped), draft_id=name, draft_revision=revision)


class _Skipped(nn.Module):
    """Replaces a layer: returns its input in the form of that layer's output."""

    def __init__(self, layer: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple
        if hasattr(layer, "attention_type"):  # some models choose a layer's mask by it
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self.returns_tuple else hidden_states


def without_layers(model: PreTrainedModel, skipped: Sequence[int]) -> PreTrainedModel:
    """Return `model` with some layers skipped: another model object on the same weights.

    Raises:
        UserError: layers that the model does not have, or a model without a list of layers.
    """
    count = model.config.get_text_config().num_hidden_layers
    if wrong := [layer for layer in skipped if layer >= count]:
        raise UserError(f"drafting.skipped names layer {wrong[0]}, but {type(model).__name__} has layers 0 to {count - 1}.")
    if len(skipped) == count:
        raise UserError(f"drafting.skipped leaves out all {count} layers; keep at least one.")
    place = place_of_layers(model)
    # Modules on the way to the layers are copied, so that the target keeps its layers; everything else is shared.
    model_copy, steps = _shallow_copy(model), place.split(".")
    parent: nn.Module = model_copy
    for step in steps[:-1]:
        part = _shallow_copy(parent.get_submodule(step))
        parent._modules[step] = part
        parent = part
    layers = _layers_of(model)
    tuples = _returns_tuple(model, layers[0])
    parent._modules[steps[-1]] = nn.ModuleList(
        _Skipped(layer, tuples) if number in skipped else layer for number, layer in enumerate(layers)
    )
    return model_copy.eval()


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """Return a model's layers."""
    return model.get_submodule(place_of_layers(model))


def _shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module with the parameters and parts of `module`; exchanging its parts does not change `module`."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


@torch.no_grad()
def _returns_tuple(model: PreTrainedModel, layer: nn.Module) -> bool:
    """Whether a layer of this model returns its state within a tuple; a forward pass shows it."""
    tuples: list[bool] = []
    handle = layer.register_forward_hook(lambda module, args, output: tuples.append(isinstance(output, tuple)))
    try:
        token = torch.zeros(1, 1, dtype=torch.long, device=model.get_input_embeddings().weight.device)
        model.base_model(input_ids=token, use_cache=False)
    finally:
        handle.remove()
    return tuples[0]


Text = tuple[Sequence[int], Tensor]  # the tokens of a prompt and of the response to it


class LayerSearch(Settings):
    """Settings of `specheads papers layer_search`."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(Warp(top_k=50), "how draft and target turn logits into probabilities")
    num_dev_prompts: PositiveCount = setting(8, "dev prompts that the target answers; drafts are compared along its responses")
    max_new_tokens: PositiveCount = setting(512, "longest response, in tokens", config="${data.max_new_tokens}")
    most_skipped: OpenProbability = setting(0.7, "largest share of the target's layers to leave out")
    engine: EngineName = setting("auto", "how the target answers: auto (the fastest here), eager, compiled or cuda_graph")


@dataclass(frozen=True)
class _SkippedLayers:
    """A set of layers to skip, and the speed of the draft without them."""

    skipped: tuple[int, ...]
    acceptance: float  # mean overlap with the target's distributions
    cost: float  # a forward pass of the draft, as a share of one of the target
    length: int  # the best fixed length
    speedup: float  # what drafts of that length are worth


def best_length(acceptance: float, cost: float, longest: int) -> tuple[int, float]:
    """Return the fixed length, of 1 to `longest` tokens, with the most tokens per second, and its speed over the target alone.

    A round of K tokens emits `(1 - a^(K+1)) / (1 - a)` (Leviathan et al. 2023, equation 1).

    Args:
        acceptance: of each token, independently.
        cost: of a draft step, as a share of a forward pass of the target.
    """
    speeds = {count: sum(acceptance**i for i in range(count + 1)) / (count * cost + 1) for count in range(1, longest + 1)}
    length = max(speeds, key=speeds.__getitem__)
    return length, speeds[length]


def _cost_without(pair: Pair, skipped: Sequence[int]) -> float:
    """Return the share of the weights that a forward pass reads without some layers."""
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in _layers_of(pair.target)]
    total = sum(sizes) + pair.target_lm.output_embedding.weight.numel()
    return 1 - sum(sizes[layer] for layer in skipped) / total


@torch.no_grad()
def _distributions_along(lm: LanguageModel, texts: Sequence[Text], warp: Warp) -> Iterator[Tensor]:
    """Yield the distributions (N, V) of the tokens of every response after its prompt."""
    for prompt, response in texts:
        tokens = torch.cat([torch.tensor(prompt), response])[None].to(lm.device)
        hidden = lm.hidden_states(tokens[:, :-1], use_cache=False)[0, len(prompt) - 1 :]
        probs = warp(lm.logits(hidden))
        check_finite(lm.name, probs)
        yield probs


def search(pair: Pair, prompts: Sequence[EncodedPrompt], settings: LayerSearch, run: Path) -> list[_SkippedLayers]:
    """Return the best set of every size that was reached, the best of all first; `run` keeps a journal of what was tried."""
    num_layers = len(_layers_of(pair.target))
    most = max(1, int(settings.most_skipped * num_layers))
    num_drafts = sum(num_layers - size for size in range(most))
    logger.info("%d of %d layers at most, %d drafts to try on %d dev prompts", most, num_layers, num_drafts, len(prompts))
    decoder = Baseline(pair, settings.warp, settings.engine)
    texts = [(ids, decoder.generate(ids, settings.max_new_tokens, seed=number).tokens) for number, (_, ids) in enumerate(prompts)]
    # On the CPU: next to a large target there is no memory for them.
    targets = [distribution.cpu() for distribution in _distributions_along(pair.target_lm, texts, settings.warp)]
    journal = _journal(pair, texts, settings, run)
    best: list[_SkippedLayers] = []
    with progress("searching", num_drafts) as advance:
        number = 0
        for _ in range(most):
            skipped, tried = best[-1].skipped if best else (), []
            for layer in sorted({*range(num_layers)} - {*skipped}):
                candidate = tuple(sorted((*skipped, layer)))
                if number not in journal.entries:
                    journal.add(number, {"acceptance": _mean_overlap(pair, candidate, texts, targets, settings.warp)})
                acceptance, cost = journal.entries[number]["acceptance"], _cost_without(pair, candidate)
                tried.append(_SkippedLayers(candidate, acceptance, cost, *best_length(acceptance, cost, MAX_TOKENS)))
                number += 1
                advance(1)
            best.append(max(tried, key=lambda layers: (layers.speedup, layers.acceptance)))
    return sorted(best, key=lambda layers: -layers.speedup)


def _mean_overlap(pair: Pair, skipped: Sequence[int], texts: Sequence[Text], targets: Sequence[Tensor], warp: Warp) -> float:
    """Return the mean overlap with the target's distributions, along its responses, of the target without some layers."""
    lm = LanguageModel(without_layers(pair.target, skipped), pair.vocab_size)
    drafts = _distributions_along(lm, texts, warp)
    shared = [overlap(target.to(draft.device), draft) for target, draft in zip(targets, drafts, strict=True)]
    return torch.cat(shared).mean().item()


def _journal(pair: Pair, texts: Sequence[Text], settings: LayerSearch, run: Path) -> Journal:
    path = run / "candidates.jsonl"
    if not is_resumed(run):
        path.unlink(missing_ok=True)
    provenance = {"target": pair.target_revision, "dtype": str(pair.target.dtype), "warp": asdict(settings.warp)}
    return Journal(path, provenance | {"texts": [ids for ids, _ in texts], "seed": settings.seed})


def print_sets(sets: Sequence[_SkippedLayers]) -> None:
    """Print a row for each set of layers."""
    table = Table("skipped layers", "acceptance", "cost", "length", "speed-up")
    for each in sets:
        skipped = ", ".join(map(str, each.skipped))
        table.add_row(skipped, f"{each.acceptance:.3f}", f"{each.cost:.3f}", f"{each.length}", f"{each.speedup:.2f}x")
    Console().print(table)
