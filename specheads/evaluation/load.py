"""`specheads load`: simulate batches of requests with every policy on the load.

Prompts are recorded once; requests for them then arrive in closed loops of several sizes, or at given rates, and are served with
each policy from the recording and a table of what steps cost. So the acceptance is that of the pair, and the costs may be those
of larger models on another machine. `specheads load --help` lists every key.
"""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair, settings_of
from specheads.commands.evaluation import config_text, prompt_data
from specheads.decoding.load.costs import LoadCosts
from specheads.errors import UserError
from specheads.evaluation.head_folders import find_heads
from specheads.evaluation.machine import versions
from specheads.evaluation.recordings import record
from specheads.evaluation.serving.candidates import Family, families, without_features
from specheads.evaluation.serving.profiled_drafts import recording_of
from specheads.evaluation.serving.readouts import read_out_of
from specheads.evaluation.serving.report import print_tables, write_tables
from specheads.evaluation.serving.settings import LoadSettings
from specheads.evaluation.serving.study import Load, LoadTable, Study
from specheads.evaluation.setup import Setup
from specheads.evaluation.speculation_profile import read_profile
from specheads.forecast import progress
from specheads.replay.recording import Recording

PROMPT_TOKENS = 256  # of a prompt, where only a profile is known


def simulate(cfg: DictConfig) -> list[LoadTable]:
    """Record, simulate, print and write the tables of all loads; return them.

    Raises:
        UserError: settings that do not fit; a head that is no look-ahead head.
    """
    settings, data = settings_of(LoadSettings, cfg), prompt_data(cfg)
    costs = settings.load_costs()
    if settings.profile is not None:
        profile = read_profile(Path(settings.profile))
        name = f"{profile.pair['draft']['id']} for {profile.pair['target']['id']}, {profile.sets[0].name}"
        dev, test = (
            recording_of(profile.sets[0], settings.num_prompts, settings.max_new_tokens, PROMPT_TOKENS, settings.seed + half)
            for half in (0, 1)
        )
        return _tables(cfg, settings, costs, dev, test, without_features(costs, settings.max_tokens), name)
    data.check("test")
    pair = load_configured_pair(cfg)
    located = find_heads(settings.head, pair, Path(cfg.paths.outputs), settings.warp)
    for name, each in located.items():
        if each.head.config.predicts != "next_token":
            raise UserError(
                f"head {name} predicts a token only after the draft has read it, when the next one is drafted already; "
                "train one with head.predicts=next_token, or use head=null."
            )
    setup = Setup(pair, located, settings.replay_settings(), data, Path(cfg.paths.data), Path(cfg.paths.run))
    dev, test = (recorded.recording for recorded in record(setup)[:2])
    heads = {name: read_out_of(dev, head) for name, head in setup.heads.items()}
    return _tables(cfg, settings, costs, dev, test, families(dev, costs, heads, settings.max_tokens), pair.name)


def _tables(
    cfg: DictConfig,
    settings: LoadSettings,
    costs: LoadCosts,
    dev: Recording,
    test: Recording,
    policies: Sequence[Family],
    name: str,
) -> list[LoadTable]:
    """Simulate, print and write the tables of all loads; return them."""
    loads = [Load(number, turnover=settings.turnover) for number in settings.concurrencies]
    loads += [Load(settings.max_batch, rate, settings.burst, settings.turnover) for rate in settings.rates]
    with progress("simulating", len(loads)) as advance:
        tables = Study(dev, test, costs, settings.num_seeds).run(policies, loads, advance)
    title = f"acceptance of {name}, costs of {costs.provenance['target']} with {costs.provenance['draft']} on "
    title += costs.provenance["device"]
    print_tables(tables, title)
    context = {"title": title, "model": name, "costs": dict(costs.provenance), "versions": versions()}
    paths = write_tables(tables, context | {"config": config_text(cfg)}, Path(cfg.paths.run))
    page = next(path for path in paths if path.suffix == ".html")
    print(*paths, f"next: open {page} in a browser", sep="\n")
    return tables


@command("load", lambda cfg: [Generation, LoadSettings])
def main(cfg: DictConfig) -> None:
    """Record, simulate, print and write the tables."""
    simulate(cfg)


if __name__ == "__main__":
    main()
