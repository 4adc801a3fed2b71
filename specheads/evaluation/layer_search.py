"""`python -m specheads.evaluation.layer_search`: which layers of the target a draft of its own can do without.

Layers are taken out one by one, each time the one without which the draft is worth most: acceptance against cost. The responses are the
target's own to dev prompts; a draft's acceptance is its laws' overlap with the target's along them, its cost the share of the weights that
it still reads. Both give the speed at the best fixed length (Leviathan et al. 2023, theorem 3.8).

Source: Draft & Verify (Zhang et al. 2023) searches such a set by Bayesian optimisation of measured time.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from data_gen.__main__ import check_data
from specheads.commands.command import command, load_configured_pair, next_command
from specheads.decoding.baseline import Baseline
from specheads.decoding.drafting.layer_skip import layers_of, without_layers
from specheads.decoding.engine import resolve_engine
from specheads.errors import UserError, is_number
from specheads.evaluation.checks import check_counts
from specheads.evaluation.prompt_sets import PromptSets
from specheads.forecast import progress
from specheads.pair import LanguageModel, Pair
from specheads.sampling import Warp
from specheads.storage.files import write_json
from specheads.storage.journal import Journal
from specheads.storage.runs import is_resumed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A set of layers to skip, and what the draft without them is worth."""

    skipped: tuple[int, ...]
    acceptance: float  # mean overlap with the target's laws
    cost: float  # of a draft forward, in those of the target
    length: int  # the best fixed one
    speedup: float  # with drafts of that length


def best_length(acceptance: float, cost: float, most: int) -> tuple[int, float]:
    """Return the fixed length up to `most` at which speculative decoding is fastest, and its speed over the target alone.

    Tokens are taken to be accepted independently, with probability `acceptance`; a draft forward costs `cost` target forwards.
    """
    speeds = [sum(acceptance**i for i in range(k + 1)) / (k * cost + 1) for k in range(most + 1)]
    length = max(range(1, most + 1), key=lambda k: speeds[k])
    return length, speeds[length]


def cost_without(pair: Pair, skipped: Sequence[int]) -> float:
    """Return the share of the weights that a forward reads without some layers."""
    sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers_of(pair.target)]
    read = sum(sizes) + pair.target_lm.output_embedding.weight.numel()
    return 1 - sum(sizes[layer] for layer in skipped) / read


@torch.no_grad()
def distributions_along(lm: LanguageModel, texts: Sequence[tuple[Sequence[int], Tensor]], warp: Warp) -> Iterator[Tensor]:
    """Yield the laws (N, V) of the tokens of every response behind its prompt."""
    for prompt, response in texts:
        tokens = torch.cat([torch.tensor(prompt), response])[None].to(lm.device)
        hidden = lm.hidden_states(tokens[:, :-1], use_cache=False)[0, len(prompt) - 1 :]
        yield warp(lm.logits(hidden))


def search(cfg: DictConfig) -> list[Candidate]:
    """Search, print and write; return the best set of every size that was reached, the best of all first.

    Raises:
        UserError: settings that cannot be.
    """
    check_counts({key: cfg[key] for key in ("num_dev_prompts", "max_new_tokens", "max_tokens")})
    if not is_number(cfg.most_skipped) or not 0 < cfg.most_skipped < 1:
        raise UserError(
            f"most_skipped={cfg.most_skipped} is outside (0, 1); it is a share of the target's layers, for example 0.7."
        )
    check_data(cfg)
    resolve_engine(cfg.engine)
    pair, warp, run = load_configured_pair(cfg), Warp(**cfg.warp), Path(cfg.paths.run)
    count = len(layers_of(pair.target))
    most = max(1, int(cfg.most_skipped * count))
    rounds = [count - number for number in range(most)]
    prompts = [ids for _, ids in PromptSets(cfg, pair, {}).dev.first(cfg.num_dev_prompts).prompts]
    logger.info("%d of %d layers at most, %d drafts to try on %d dev prompts", most, count, sum(rounds), len(prompts))
    decoder = Baseline(pair, warp, cfg.engine)
    texts = [(ids, decoder.generate(ids, cfg.max_new_tokens, seed=number).tokens) for number, ids in enumerate(prompts)]
    distributions = [
        distribution.cpu() for distribution in distributions_along(pair.target_lm, texts, warp)
    ]  # beside a large target there is no room for them
    path = run / "candidates.jsonl"
    if not is_resumed(run):
        path.unlink(missing_ok=True)
    provenance = {"target": pair.target_revision, "warp": OmegaConf.to_container(cfg.warp), "texts": [ids for ids, _ in texts]}
    journal, found, skipped = Journal(path, provenance | {"seed": cfg.seed}), [], ()
    with progress("searching", sum(rounds)) as advance:
        for number in range(most):
            tried = []
            for layer in (one for one in range(count) if one not in skipped):
                candidate = tuple(sorted((*skipped, layer)))
                key = sum(rounds[:number]) + len(tried)
                if key not in journal.entries:
                    lm = LanguageModel(without_layers(pair.target, candidate), pair.vocab_size)
                    drafts = distributions_along(lm, texts, warp)
                    overlap = [torch.minimum(t.to(d.device), d).sum(dim=1) for t, d in zip(distributions, drafts, strict=True)]
                    journal.add(key, {"acceptance": torch.cat(overlap).mean().item()})
                acceptance, cost = journal.entries[key]["acceptance"], cost_without(pair, candidate)
                tried.append(Candidate(candidate, acceptance, cost, *best_length(acceptance, cost, cfg.max_tokens)))
                advance(1)
            found.append(max(tried, key=lambda one: (one.speedup, one.acceptance)))
            skipped = found[-1].skipped
    found.sort(key=lambda one: -one.speedup)
    report(found, run)
    return found


def report(found: Sequence[Candidate], run: Path) -> None:
    """Print the candidates and write them."""
    print(f"\n{'skipped layers':<40}{'acceptance':>12}{'cost':>8}{'length':>8}{'speed-up':>10}")
    for one in found:
        layers = ", ".join(map(str, one.skipped))
        print(f"{layers:<40}{one.acceptance:12.3f}{one.cost:8.3f}{one.length:8d}{one.speedup:9.2f}x")
    write_json(run / "layer_search.json", [asdict(one) for one in found])
    print(f"\n{run / 'layer_search.json'}")
    best = ",".join(map(str, found[0].skipped))
    print(f"next: {next_command('evaluate.py', 'head=null', 'drafting=layer_skip', f'drafting.skipped=[{best}]')}")


@command("layer_search")
def main(cfg: DictConfig) -> None:
    search(cfg)


if __name__ == "__main__":
    main()
