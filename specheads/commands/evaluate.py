"""`specheads evaluate model=llama2-7b head=latest`: record once, replay every stopping rule, decode the best, and report."""

import logging
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair
from specheads.commands.evaluation import config_text, evaluation_settings, prompt_data
from specheads.commands.loggers import open_loggers
from specheads.evaluation.console import print_report
from specheads.evaluation.draft_comparison import compared, read_report
from specheads.evaluation.evaluate import evaluate as evaluate_heads
from specheads.evaluation.head_folders import find_heads
from specheads.evaluation.prompt_data import PromptData
from specheads.evaluation.report import Report
from specheads.evaluation.report_files import write_report
from specheads.evaluation.settings import Evaluation

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
    heads = find_heads(settings.head, settings.drafting.pair(pair), Path(cfg.paths.outputs), settings.warp, settings.any_draft)
    logger.info("heads: %s", ", ".join(head.where for head in heads.values()) or "none")
    folders = Path(cfg.paths.data), Path(cfg.paths.run)
    report = evaluate_heads(pair, heads, settings, data, folders, earlier, config_text(cfg))
    try:
        report = replace(report, drafts=compared(report, earlier) if earlier else [])
    finally:  # an evaluation is kept even if it cannot be compared
        print_report(report)
        paths = write_report(report, folders[1])
        print(*paths, f"next: open {paths[0]} in a browser", sep="\n")
    return report


@command("evaluate", lambda cfg: [Generation, Evaluation])
def main(cfg: DictConfig) -> None:
    """Evaluate, print and write the report."""
    evaluate(cfg)
