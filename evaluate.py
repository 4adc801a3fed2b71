"""`python evaluate.py model=llama2-7b head=latest`: sweep fixed lengths and head thresholds live, and report.

`python evaluate.py --help` lists every key.
"""

import hashlib
import logging
import platform
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from data_gen.__main__ import check_data, generation_settings
from data_gen.prompts import unique
from data_gen.run import encode_prompts
from specheads.cli import command, load_configured_pair
from specheads.decoding.engine import resolve_engine
from specheads.decoding.verification import VerificationRule
from specheads.errors import UserError, is_count, is_number
from specheads.evaluation.journal import Journal
from specheads.evaluation.report import Report, make_report, print_report, write_report
from specheads.evaluation.sweep import run_sweep, sweep_settings
from specheads.forecast import Forecast
from specheads.heads.checkpoint import latest_head, load_head
from specheads.heads.head import AcceptanceHead
from specheads.pair import Pair, config_folder
from specheads.runs import is_resumed
from specheads.sampling import Warp

logger = logging.getLogger(__name__)


def evaluate(cfg: DictConfig) -> Report:
    """Decode the test prompts with every setting; write and return the report."""
    check(cfg)
    verification = instantiate(cfg.verification)  # before the models: a wrong rate should not wait for 70 B
    drafting, others = instantiate(cfg.drafting), {name: named_verification(name) for name in cfg.compare_verification}
    pair = load_configured_pair(cfg)
    head, where = find_head(cfg, pair)
    settings = sweep_settings(cfg.fixed_lengths, head, cfg.thresholds, verification.stopping, others)
    prompts = first_test_prompts(cfg, pair)
    total = len(settings) * len(prompts) * cfg.repeats
    logger.info("head: %s", where or "none")
    logger.info(
        "%d settings x %d prompts x %d repeats = %d responses of at most %d tokens, into %s",
        *(len(settings), len(prompts), cfg.repeats, total, cfg.max_new_tokens, cfg.paths.run),
    )
    made_of = {
        "settings": [(one.name, repr(one.verification and one.verification.program)) for one in settings],
        "prompts": prompts,
        "seed": cfg.seed,
    }
    made_of |= {"pair": [pair.target_revision, pair.draft_revision], "head": head and fingerprint(head), "repeats": cfg.repeats}
    made_of |= {"warp": OmegaConf.to_container(cfg.warp), "max_new_tokens": cfg.max_new_tokens}
    made_of |= {
        "device": device_name(pair),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "engine": resolve_engine(cfg.engine),
    }
    made_of |= {"drafting": OmegaConf.to_container(cfg.drafting), "verification": verification.label}
    made_of |= {"dtype": [str(pair.target.dtype), str(pair.draft.dtype)]}
    path = Path(cfg.paths.run) / "generations.jsonl"
    if not is_resumed(path.parent):
        path.unlink(missing_ok=True)
    journal = Journal(path, made_of)
    columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task("", total=total)
        forecast = Forecast("decoding")

        def advance(count: int) -> None:
            bar.advance(task, count)
            forecast.update(bar.tasks[0].completed, total)

        measured = run_sweep(
            pair,
            settings,
            prompts,
            Warp(**cfg.warp),
            max_new_tokens=cfg.max_new_tokens,
            repeats=cfg.repeats,
            seed=cfg.seed,
            engine=cfg.engine,
            drafting=drafting,
            verification=verification,
            on_generation=advance,
            journal=journal,
        )
    context = {"model": pair.name, "head": where, "num_prompts": len(prompts), "repeats": cfg.repeats, "warp": dict(cfg.warp)}
    context |= {"target": pair.target_id, "draft": pair.draft_id, "max_new_tokens": cfg.max_new_tokens, "seed": cfg.seed}
    context |= {"device": device_name(pair), "threads": torch.get_num_threads(), "torch": torch.__version__}
    context |= {"verification": verification.label, "lossless": verification.lossless}
    report = make_report(measured, context, cfg.ratios)
    print_report(report)
    for path in write_report(report, Path(cfg.paths.run)):
        print(path)
    return report


def check(cfg: DictConfig) -> None:
    """Raise UserError for what can be known to be wrong before models are loaded."""
    for key in ("fixed_lengths", "thresholds", "ratios", "compare_verification"):
        if not isinstance(cfg[key], ListConfig):
            raise UserError(f"{key}={cfg[key]} is not a list; write for example '{key}=[{cfg[key]}]'.")
    if wrong := [t for t in cfg.thresholds if not is_number(t) or not 0 <= t <= 1]:
        raise UserError(f"threshold={wrong[0]} is outside [0, 1]; it is a probability of rejection, for example 0.7.")
    if wrong := [k for k in cfg.fixed_lengths if not is_count(k, least=1)]:
        raise UserError(f"fixed length {wrong[0]} is no count of at least 1; it says how many tokens are drafted, for example 4.")
    if wrong := [r for r in cfg.ratios if not is_number(r) or not r > 1]:
        raise UserError(
            f"ratio {wrong[0]} is not above 1; it says how many draft forwards a target forward costs, for example 10."
        )
    if len({*cfg.fixed_lengths} if cfg.head is None else {*cfg.fixed_lengths, *cfg.thresholds}) < 2:
        raise UserError(
            "fewer than two draft lengths are to be measured, which cannot tell the costs of draft and target apart; add some."
        )
    for key in ("num_prompts", "repeats", "max_new_tokens"):
        if not is_count(cfg[key], least=1):
            raise UserError(f"{key}={cfg[key]} is no count of at least 1.")
    if cfg.head is not None and not isinstance(cfg.head, str):
        raise UserError(f"head={cfg.head} is no name; give a folder, a hub id, latest, or null for fixed lengths only.")
    resolve_engine(cfg.engine)
    check_data(cfg)


def named_verification(name: str) -> VerificationRule:
    """Return the rule of conf/verification/<name>.yaml with that file's values; raises UserError if there is none."""
    known = {path.stem: path for path in sorted((config_folder() / "verification").glob("*.yaml"))}
    if name not in known:
        raise UserError(f"compare_verification={name} is not known; use some of {', '.join(known)}.")
    return instantiate(OmegaConf.load(known[name]))


def find_head(cfg: DictConfig, pair: Pair) -> tuple[AcceptanceHead | None, str | None]:
    """Return the head that `head=` names and where it is."""
    if cfg.head is None:
        return None, None
    where = latest_head(Path(cfg.paths.outputs), pair) if cfg.head == "latest" else cfg.head
    head = load_head(where)
    head.check_fits(pair)
    if head.config.warp and dict(head.config.warp) != dict(cfg.warp):
        logger.warning("the head was trained under %s, but decoding uses %s", dict(head.config.warp), dict(cfg.warp))
    return head, str(where)


def first_test_prompts(cfg: DictConfig, pair: Pair) -> list[list[int]]:
    """Return the ids of the first `num_prompts` test prompts."""
    test = [prompt for prompt in unique(instantiate(cfg.data.source).load(pair.chats)) if prompt.split == "test"]
    if not test:
        raise UserError("the data set has no test prompts; set data.num_test, or use a data set with more rows.")
    return [ids for _, ids in encode_prompts(pair, test, generation_settings(cfg))[: cfg.num_prompts]]


def fingerprint(head: AcceptanceHead) -> str:
    """Return what tells two heads apart."""
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in head.state_dict().values())).hexdigest()[:16]


def device_name(pair: Pair) -> str:
    device = pair.target_lm.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


@command("evaluate")
def main(cfg: DictConfig) -> None:
    evaluate(cfg)


if __name__ == "__main__":
    main()
