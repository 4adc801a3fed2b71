"""`specheads evaluate model=llama2-7b head=latest`: record once, replay every stopping rule, decode the best, and report."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair
from specheads.commands.evaluation import config_text, evaluation_settings, prompt_data
from specheads.commands.loggers import open_loggers
from specheads.decoding.stopping import MAX_TOKENS
from specheads.errors import UserError
from specheads.evaluation.console import print_report
from specheads.evaluation.draft_comparison import compared, read_report
from specheads.evaluation.evaluate import evaluate as evaluate_heads
from specheads.evaluation.head_folders import LocatedHead, find_heads
from specheads.evaluation.prompt_data import PromptData
from specheads.evaluation.recordings import Recorder
from specheads.evaluation.report import Report
from specheads.evaluation.report_files import write_report
from specheads.evaluation.settings import Evaluation
from specheads.pair import Pair
from specheads.prompts.prompt import unique
from specheads.replay.response_tree import RecordSettings
from specheads.training.heads.calibrate import calibrate, is_kept

logger = logging.getLogger(__name__)


def evaluate(cfg: DictConfig) -> Report:
    """Evaluate a composed config; write and return the report."""
    # Mistakes and failed logins are reported before the models are loaded, which may take minutes.
    settings, data = evaluation_settings(cfg), prompt_data(cfg)
    data.check(settings.split)
    with open_loggers(cfg, Path(cfg.paths.run)) as loggers:
        report = run(cfg, settings, data)
        if loggers:
            from specheads.evaluation.wandb_log import log_report  # imports lightning and wandb

            log_report(report, loggers)
    return report


def run(cfg: DictConfig, settings: Evaluation, data: PromptData) -> Report:
    """Load the models, evaluate, print and write the report."""
    earlier = {where: read_report(where) for where in settings.compare}
    pair = load_configured_pair(cfg)
    folders = Path(cfg.paths.data), Path(cfg.paths.run)

    def located() -> dict[str, LocatedHead]:
        drafting_pair = settings.drafting.pair(pair)
        return find_heads(settings.head, drafting_pair, Path(cfg.paths.outputs), settings.warp, settings.any_draft)

    heads = located()
    logger.info("heads: %s", ", ".join(head.where for head in heads.values()) or "none")
    if settings.calibrate:
        calibrate_again([head.where for head in heads.values()], settings.drafting.pair(pair), settings, data, folders[0])
        heads = located()
    report = evaluate_heads(pair, heads, settings, data, folders, earlier, config_text(cfg))
    try:
        report = replace(report, drafts=compared(report, earlier) if earlier else [])
    finally:  # an evaluation is kept even if it cannot be compared
        print_report(report)
        paths = write_report(report, folders[1])
        print(*paths, f"next: open {paths[0]} in a browser", sep="\n")
    return report


def calibrate_again(
    heads: Sequence[str], pair: Pair, settings: Evaluation, data: PromptData, data_folder: Path
) -> dict[str, dict[str, float]]:
    """Fit the calibration of the heads in these folders to dev prompts; print and return the errors by head (see `calibrate`).

    Raises:
        UserError: no head, a head on the hub, or no dev prompts that the heads did not learn from.
    """
    folders = [Path(where) for where in heads]
    if not folders:
        raise UserError("calibrate=true needs a head, but head=null; name one, or leave out calibrate=true.")
    if elsewhere := [folder for folder in folders if not folder.is_dir()]:
        raise UserError(
            f"head={elsewhere[0]} is on the hub, and a calibration is written into a local folder; download it first."
        )
    limits = replace(data.limits, max_new_tokens=settings.max_new_tokens)
    amounts = RecordSettings(settings.record.num_samples, MAX_TOKENS, settings.record.batch_size)
    recorder = Recorder(pair, settings.warp, limits, amounts, settings.seed, data_folder)
    errors = calibrate(settings.num_dev_prompts, recorder, unique(data.source.load(pair.chats)), folders)
    for folder, (name, error) in zip(folders, errors.items(), strict=True):
        before = f"{error['before']:.1%} with its calibration" if "before" in error else f"{error['raw']:.1%} uncalibrated"
        print(f"{name}: expected calibration error {before}, {error['cross_fitted']:.1%} with one from other prompts of this set")
        is_new = "calibrated" if not is_kept(error) else "left as it is: its calibration is at least as good on these prompts"
        print(f"{folder} {is_new}")
    return errors


@command("evaluate", lambda cfg: [Generation, Evaluation])
def main(cfg: DictConfig) -> None:
    """Evaluate, print and write the report."""
    evaluate(cfg)
