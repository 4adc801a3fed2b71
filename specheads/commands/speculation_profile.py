"""`specheads profile model=... [head=...]`: write `speculation_profile.json`, what a draft and its head are worth on some data.

It lies beside the head, or beside a draft that is a local folder, and otherwise in the folder of the run. `specheads profile
--help` lists every key.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pydantic import SkipValidation
from rich.console import Console
from rich.table import Table

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair, settings_of
from specheads.commands.evaluation import named_test_sets, prompt_data
from specheads.decoding.stopping import MAX_TOKENS
from specheads.errors import UserError
from specheads.evaluation.head_folders import LocatedHead, find_heads
from specheads.evaluation.prompt_data import TestSet
from specheads.evaluation.prompt_sets import PromptSets
from specheads.evaluation.recordings import Recorder
from specheads.evaluation.settings import ReplaySettings
from specheads.evaluation.setup import versions
from specheads.evaluation.speculation_profile import Profile, set_profile
from specheads.pair import Pair
from specheads.replay.response_tree import RecordSettings
from specheads.revisions import resolve
from specheads.sampling import Warp
from specheads.settings import Built, PositiveCount, Seed, Settings, Text, setting

SHOWN = (1, 2, 4, 8)  # lengths of drafts in the table


class ProfileSettings(Settings):
    """What is profiled."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    warp: Built[Warp] = setting(Warp(top_k=50), "how draft and target turn logits into probabilities")
    head: Text | None = setting(
        None, "a head's folder, latest: the newest of this pair, or null for a profile of the draft alone"
    )
    num_prompts: PositiveCount = setting(100, "test prompts of each data set to record")
    test_sets: SkipValidation[Mapping[str, TestSet]] | None = setting(
        None, "more prompts to profile on, {name: file}, by a name of conf/data"
    )
    num_samples: PositiveCount = setting(4, "acceptance samples of each response; more make smaller errors")
    batch_size: PositiveCount = setting(
        64, "rejected branches of the longest text that the draft reads together; fewer take less memory"
    )
    max_new_tokens: PositiveCount = setting(512, "longest response, in tokens")


def write_profile(cfg: DictConfig) -> Path:
    """Profile the draft of a composed config on its test prompts; print the main numbers, write the file and return its path.

    Raises:
        UserError: several heads, or a pair, head or prompts that do not fit.
    """
    settings = settings_of(ProfileSettings, cfg, test_sets=named_test_sets(cfg.test_sets, cfg.num_prompts))
    data = prompt_data(cfg)
    data.check("test")
    pair = load_configured_pair(cfg)
    located = find_heads(settings.head, pair, Path(cfg.paths.outputs), settings.warp)
    if len(located) > 1:
        raise UserError(f"head={settings.head} holds {len(located)} heads, and a profile is of one: {', '.join(located)}.")
    head = next(iter(located.values()), None)
    chosen = ReplaySettings(warp=settings.warp, num_prompts=settings.num_prompts, test_sets=settings.test_sets)
    sets = {name: each for name, each in PromptSets(data, pair, located, chosen).recorded().items() if each.role == "test"}
    amounts = RecordSettings(settings.num_samples, MAX_TOKENS, settings.batch_size)
    limits = replace(data.limits, max_new_tokens=settings.max_new_tokens)
    recorder = Recorder(pair, settings.warp, limits, amounts, settings.seed, Path(cfg.paths.data))
    heads = [] if head is None else [head.head]
    recordings = recorder.record({name: each.prompts for name, each in sets.items()}, heads, ground_truth=False)
    profiles = [
        set_profile(name, each.provenance(), recordings[name], each.groups, None if head is None else head.head)
        for name, each in sets.items()
    ]
    sizes = {name: getattr(settings, name) for name in ("seed", "num_samples", "max_new_tokens")}
    profile = Profile(_described(pair, head), asdict(settings.warp), sizes, profiles, versions())
    _show(profile)
    path = profile.write(_folder(cfg, pair, head))
    print(path)
    return path


def _described(pair: Pair, head: LocatedHead | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "draft": {"id": pair.draft_id, "revision": pair.draft_revision, "dtype": str(pair.draft.dtype)},
        "target": {"id": pair.target_id, "revision": pair.target_revision, "dtype": str(pair.target.dtype)},
    }
    return (
        described
        if head is None
        else described | {"head": {"id": Path(head.where).name, "inputs": list(head.head.config.inputs)}}
    )


def _folder(cfg: DictConfig, pair: Pair, head: LocatedHead | None) -> Path:
    """Return where the file belongs: into the head's folder, or the draft's, where that is the user's, or else the run's."""
    for location in (None if head is None else head.where, pair.draft_id):
        if location is not None and Path(location).is_dir() and resolve(location) == str(location):
            return Path(location)
    return Path(cfg.paths.run)


def _show(profile: Profile) -> None:
    """Print the main numbers as a table."""
    table = Table(title="tokens per round, by the number of drafted tokens")
    for name in ("prompts", *(f"K={length}" for length in SHOWN), "head"):
        table.add_column(name, justify="left" if name == "prompts" else "right")
    for each in profile.sets:
        yields = [each.tokens_per_round[length - 1] for length in SHOWN]
        head = "" if each.head is None else f"{each.head.tokens_per_round.value:.2f} of {each.head.drafted_per_round.value:.2f}"
        table.add_row(each.name, *(f"{each.value:.2f} [{each.low:.2f}, {each.high:.2f}]" for each in yields), head)
    Console().print(table)


@command("profile", lambda cfg: [Generation, ProfileSettings])
def main(cfg: DictConfig) -> None:
    """Write the profile."""
    write_profile(cfg)


if __name__ == "__main__":
    main()
