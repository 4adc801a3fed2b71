"""`specheads reproduce experiment=<name>`: repeat an experiment of a paper, and check the paper's claims on its results."""

import shlex
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import specheads
from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair, plain, settings_of
from specheads.commands.evaluation import prompt_data
from specheads.commands.methods import methods_of
from specheads.errors import UserError
from specheads.evaluation.head_folders import LocatedHead, find_heads
from specheads.evaluation.prompt_sets import PromptSet, PromptSets
from specheads.evaluation.reproduction.checks import checked, measured
from specheads.evaluation.reproduction.decoding import decode
from specheads.evaluation.reproduction.report import Reproduced, print_result, write_result
from specheads.evaluation.reproduction.settings import Reproduction
from specheads.evaluation.settings import ReplaySettings
from specheads.pair import Pair
from specheads.replay.head_scores import head_fingerprint


def reproduce(cfg: DictConfig) -> Reproduced:
    """Repeat the experiment of a composed config; print, write and return its result.

    Raises:
        UserError: settings that do not fit, or no head for a method that needs one.
    """
    settings, data = settings_of(Reproduction, cfg, methods=methods_of(plain(cfg.methods))), prompt_data(cfg)
    check_head(settings, cfg.model.name)
    data.check(settings.split)
    pair, run = load_configured_pair(cfg), Path(cfg.paths.run)
    head = located_head(settings, pair, Path(cfg.paths.outputs))
    heads = {} if head is None else {Path(head.where).name: head}
    sets = PromptSets(data, pair, heads, ReplaySettings(split="final" if settings.split == "final" else "test"))
    prompts = (sets.dev if settings.split == "dev" else sets.reported).first(settings.num_prompts)
    tallies = decode(pair, settings, prompts.prompts, run, head)
    result = Reproduced(
        experiment=Path(cfg.command).name,
        command=command_line(),
        provenance=provenance(pair, settings, prompts, head),
        methods=measured(tallies, settings.metrics, prompts.groups),
        claims=[checked(claim, tallies, prompts.groups) for claim in settings.reported_claims],
    )
    print_result(result)
    outcomes = [claim.outcome for claim in result.claims]
    counts = ", ".join(f"{outcomes.count(outcome)} {outcome}" for outcome in dict.fromkeys(outcomes)) or "none"
    print(
        f"{len(prompts.prompts)} prompts decoded by {len(tallies)} methods; claims: {counts}", write_result(result, run), sep="\n"
    )
    return result


def check_head(settings: Reproduction, model: str) -> None:
    """Raise UserError if a method needs a head and none is named."""
    needing = [method.name for method in settings.methods if method.needs_head]
    if needing and settings.head is None:
        raise UserError(
            f"head=null, but {needing[0]} decodes with a head; train it with 'specheads train model={model} "
            "experiment=specdecpp', and give head=latest or its folder."
        )


def located_head(settings: Reproduction, pair: Pair, outputs: Path) -> LocatedHead | None:
    """Return the head that the methods share; None where none needs it. Raises UserError for a folder of several."""
    if not any(method.needs_head for method in settings.methods):
        return None
    heads = find_heads(settings.head, pair, outputs, settings.warp)
    if len(heads) > 1:
        raise UserError(f"head={settings.head} has {len(heads)} heads; give the folder of one, such as {next(iter(heads))}.")
    return next(iter(heads.values()))


def provenance(pair: Pair, settings: Reproduction, prompts: PromptSet, head: LocatedHead | None) -> dict[str, object]:
    """Return all that decides a result and does not depend on the machine."""
    with_head = {} if head is None else {"head": {"fingerprint": head_fingerprint(head.head)}}
    return with_head | {
        "model": {
            "name": pair.name,
            "target": [pair.target_id, pair.target_revision],
            "draft": [pair.draft_id, pair.draft_revision],
        },
        "prompts": {"name": prompts.name, "split": settings.split, **prompts.provenance()},
        "warp": asdict(settings.warp),
        "seed": settings.seed,
        "max_new_tokens": settings.max_new_tokens,
        "ratio": settings.ratio,
        "settings": [dict(method.keys) for method in settings.methods],
        "versions": {"specheads": specheads.__version__},
    }


def command_line() -> str:
    """Return this command without the keys that say where files are."""
    given = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
    kept = [override for override in given if not override.lstrip("+").startswith(("paths.", "resume="))]
    return shlex.join(["specheads", "reproduce", *kept])


@command("reproduce", lambda cfg: [Generation, Reproduction])
def main(cfg: DictConfig) -> None:
    """Repeat an experiment, print and write its result."""
    reproduce(cfg)


if __name__ == "__main__":
    main()
