"""`specheads probe model=...`: what speculation would be worth for a pair on this machine, before anything is trained.

It records the target's responses to some prompts, times the steps of decoding, replays fixed lengths and rules without a head,
decodes a few prompts as a check, and names the way to decode that pays, with the command that comes next. `specheads probe
--help` lists every key.
"""

from pathlib import Path

from omegaconf import DictConfig

from data_gen.settings import Generation
from specheads.commands.command import command, next_command
from specheads.commands.compose import load_configured_pair, settings_of
from specheads.commands.evaluate import config_text, prompt_data
from specheads.errors import UserError
from specheads.evaluation.probe.probe import Probe, Probed, probe
from specheads.evaluation.probe.report import print_probe, write_probe
from specheads.evaluation.prompt_data import PromptData, file_source
from specheads.integrations.served_target import Server, served_pair
from specheads.prompts.data_set_source import DatasetSource
from specheads.storage.files import without_home


def probe_pair(cfg: DictConfig) -> Probed:
    """Probe the pair of a composed config; print and write what was found, and return it.

    Raises:
        UserError: a pair whose models do not fit, too few prompts, a server that does not answer.
    """
    settings, data = settings_of(Probe, cfg), prompts_of(cfg)
    data.source.check()
    pair = load_configured_pair(cfg, only_draft=settings.remote_url is not None)
    if settings.remote_url is not None:
        server = Server(settings.remote_url, settings.remote_model, settings.remote_requests)
        pair = served_pair(pair, server, settings.warp)
    prompts = [] if cfg.prompts is None else [f"data.path={cfg.prompts}"]  # what comes next is for the same prompts
    probed = probe(
        pair,
        settings,
        data,
        Path(cfg.paths.data),
        lambda verb, *words: without_home(next_command(verb, *prompts, *words)),  # which the report has, too
        {"config": config_text(cfg)},
    )
    page, numbers = write_probe(probed, Path(cfg.paths.run))
    print_probe(probed)
    print(f"numbers: {numbers}\nreport: {page}\nnext: {probed.answer.command}")
    return probed


def prompts_of(cfg: DictConfig) -> PromptData:
    """Return the prompts of a config: those of `prompts=`, a file in the format of the chosen data set, or those of that set."""
    data = prompt_data(cfg)
    if cfg.prompts is None:
        return data
    if not isinstance(data.source, DatasetSource):
        raise UserError(
            f"prompts={cfg.prompts}: the chosen data set reads no file; add data=alpaca, whose templates fit files with the "
            "field instruction (for other fields: data.template=)."
        )
    test_set = file_source(data.source, str(cfg.prompts), cfg.num_prompts)
    return PromptData(test_set.source, data.limits, Path(str(cfg.prompts)).stem)


@command("probe", Generation, Probe)
def main(cfg: DictConfig) -> None:
    """Probe a pair."""
    probe_pair(cfg)


if __name__ == "__main__":
    main()
