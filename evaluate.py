"""`python evaluate.py model=llama2-7b head=latest`: record once, replay every stopping rule, decode the best, and report.

`python evaluate.py --help` lists every key.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import wandb
from hydra.utils import instantiate
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from data_gen.settings import Generation
from specheads.commands.command import command
from specheads.commands.compose import load_configured_pair
from specheads.commands.loggers import new_logger
from specheads.decoding.drafting import Drafting
from specheads.decoding.engine import resolve_engine
from specheads.decoding.pairing import check_pairing
from specheads.decoding.verification import VerificationRule
from specheads.errors import UserError
from specheads.evaluation.checks import check_counts, check_decoded, check_lists, check_replay
from specheads.evaluation.console import print_report
from specheads.evaluation.drafts import check_context, compared, read_report
from specheads.evaluation.find import find_heads
from specheads.evaluation.report import write_report
from specheads.evaluation.results import Report
from specheads.evaluation.run import Evaluation
from specheads.evaluation.wandb_log import log_report
from specheads.pair import config_folder

logger = logging.getLogger(__name__)


def evaluate(cfg: DictConfig) -> Report:
    """Do what the config asks for; write and return the report."""
    check(cfg)
    verification = instantiate(cfg.verification)  # before the models: a wrong rate should not wait for 70 B
    drafting, others = instantiate(cfg.drafting), {name: named_verification(name) for name in cfg.compare_verification}
    for rule in (verification, *others.values()):
        check_pairing(drafting, rule)
    check_decoded(cfg, drafting, verification)
    # A login that fails should not wait either.
    loggers = [new_logger(one, Path(cfg.paths.run)) for one in (cfg.get("logger") or {}).values()]
    try:
        return run(cfg, loggers, drafting, verification, others)
    finally:
        wandb.finish()


def run(
    cfg: DictConfig,
    loggers: Sequence[Logger],
    drafting: Drafting,
    verification: VerificationRule,
    others: Mapping[str, VerificationRule],
) -> Report:
    """Load the models, do all steps, print and write the report."""
    earlier = {str(where): read_report(where) for where in cfg.compare}
    pair = drafting.pair(load_configured_pair(cfg))
    heads = find_heads(cfg, pair)
    logger.info("heads: %s", ", ".join(one.where for one in heads.values()) or "none")
    evaluation = Evaluation(cfg, pair, heads, drafting, verification, others)
    if earlier:
        evaluation.prompts.recorded()  # so that other prompts are refused before hours of work
    for where, theirs in earlier.items():
        check_context(evaluation.context(), theirs, where)
    report = evaluation.run()
    try:
        report = replace(report, drafts=compared(report, earlier) if earlier else [])
    finally:  # what was evaluated is kept, even if it cannot be compared
        print_report(report)
        for path in write_report(report, Path(cfg.paths.run)):
            print(path)
    evaluation.recommend(report)
    log_report(report, loggers)
    return report


def check(cfg: DictConfig) -> None:
    """Raise UserError for what can be known to be wrong before models are loaded."""
    check_lists(cfg, "compare", "compare_verification", "live_rules")
    check_replay(cfg)
    if cfg.live not in ("winners", "all", "none"):
        raise UserError(f"live={cfg.live} is not known; use winners, all or none.")
    if cfg.live == "none" and not cfg.ratios:
        raise UserError("live=none with ratios=[] leaves nothing to reckon with; give some, for example ratios=[5,10,20].")
    known = {path.stem for path in (config_folder() / "stopping").glob("*.yaml")}
    if wrong := [name for name in cfg.live_rules if name not in known]:
        raise UserError(
            f"live_rules names {wrong[0]!r}, which is no rule of conf/stopping; use for example 'live_rules=[fixed_length]'."
        )
    check_counts({key: cfg[key] for key in ("num_live_prompts", "repeats", "block", "beams")})
    if not isinstance(cfg.any_draft, bool):
        raise UserError(f"any_draft={cfg.any_draft} is neither true nor false.")
    if cfg.baseline not in ("target", "mjgd"):
        raise UserError(f"baseline={cfg.baseline} is not known; use target or mjgd.")
    if cfg.head is not None and not isinstance(cfg.head, str):
        raise UserError(f"head={cfg.head} is no name; give a folder, a hub id, latest, or null for rules without a head.")
    resolve_engine(cfg.engine)


def named_verification(name: str) -> VerificationRule:
    """Return the rule of conf/verification/<name>.yaml with that file's values; raises UserError if there is none."""
    known = {path.stem: path for path in sorted((config_folder() / "verification").glob("*.yaml"))}
    if name not in known:
        raise UserError(f"compare_verification={name} is not known; use some of {', '.join(known)}.")
    return instantiate(OmegaConf.load(known[name]))


@command("evaluate", lambda cfg: [Generation])
def main(cfg: DictConfig) -> None:
    evaluate(cfg)


if __name__ == "__main__":
    main()
