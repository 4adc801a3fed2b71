"""What can be known to be wrong of an evaluation's settings before models are loaded."""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from data_gen.__main__ import check_data
from specheads.errors import UserError, is_count, is_number
from specheads.evaluation.candidates import check_rules
from specheads.evaluation.find import known_data_sets
from specheads.evaluation.prompt_sets import check_split


def check_replay(cfg: DictConfig) -> None:
    """Raise UserError for what is wrong with conf/replay.yaml's keys, the rules or the data."""
    check_lists(cfg, "fixed_lengths", "thresholds", "ratios")
    if wrong := [t for t in cfg.thresholds if t != "auto" and not (is_number(t) and 0 <= t <= 1)]:
        raise UserError(f"threshold={wrong[0]} is outside [0, 1]; it is a probability of rejection, for example 0.7, or auto.")
    if wrong := [k for k in cfg.fixed_lengths if not is_count(k, least=1)]:
        raise UserError(f"fixed length {wrong[0]} is no count of at least 1; it says how many tokens are drafted, for example 4.")
    if wrong := [r for r in cfg.ratios if not is_number(r) or not r > 1]:
        raise UserError(
            f"ratio {wrong[0]} is not above 1; it says how many draft forwards a target forward costs, for example 10."
        )
    if wrong := [key for key, value in cfg.costs.items() if not (is_share(value) or (key == "head_share" and value is None))]:
        raise UserError(
            f"costs.{wrong[0]}={cfg.costs[wrong[0]]}: expected a number of at least 0, a share of a "
            f"{'draft step' if wrong[0] == 'head_share' else 'forward pass of the target'}, for example 0.1."
        )
    if "fixed_length" not in (cfg.get("stopping") or {}):
        raise UserError(
            "stopping leaves out fixed_length, over which every gain is stated; add it, for example "
            "'stopping=[fixed_length,head_threshold]', or use stopping=all."
        )
    check_rules(OmegaConf.to_container(cfg.stopping, resolve=True))
    counts = {key: cfg[key] for key in ("num_prompts", "num_dev_prompts", "max_new_tokens")}
    check_counts(counts | {f"record.{key}": cfg.record[key] for key in ("num_draws", "batch_size")})
    known_data_sets(cfg.test_sets or {})
    check_data(cfg)
    check_split(cfg)


def is_share(value: Any) -> bool:
    """Whether a value is a number of at least 0."""
    return is_number(value) and value >= 0


def check_lists(cfg: DictConfig, *keys: str) -> None:
    """Raise UserError for the first of `keys` whose value is no list."""
    for key in keys:
        if not isinstance(cfg[key], ListConfig):
            raise UserError(f"{key}={cfg[key]} is not a list; write for example '{key}=[{cfg[key]}]'.")


def check_counts(counts: Mapping[str, Any]) -> None:
    """Raise UserError for the first of `counts`, by key, that is none of at least 1."""
    for key, value in counts.items():
        if not is_count(value, least=1):
            raise UserError(f"{key}={value} is no count of at least 1.")
