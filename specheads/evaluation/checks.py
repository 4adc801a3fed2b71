"""What can be known to be wrong of an evaluation's settings before models are loaded."""

from collections.abc import Mapping
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf

from data_gen.__main__ import check_data
from specheads.decoding.drafting import Autoregressive, Drafting
from specheads.decoding.stopping import FixedLength
from specheads.decoding.verification import TokenVerification, VerificationRule
from specheads.errors import UserError, is_count, is_number
from specheads.evaluation.candidate import RuleChoice
from specheads.evaluation.candidates import check_rules, takes_head
from specheads.evaluation.find import known_data_sets
from specheads.evaluation.prompt_sets import check_split

COSTS = {
    "head_share": "draft step",
    "verified_share": "forward pass of the target",
}  # keys of `costs`, and what they are shares of


def check_replay(cfg: DictConfig) -> None:
    """Raise UserError for what is wrong with conf/replay.yaml's keys, the rules or the data."""
    check_lists(cfg, "fixed_lengths", "thresholds", "ratios")
    if wrong := [t for t in cfg.thresholds if t != "auto" and not (is_number(t) and 0 <= t <= 1)]:
        raise UserError(f"threshold={wrong[0]} is outside [0, 1]; it is a probability of rejection, for example 0.7, or auto.")
    if wrong := [k for k in cfg.fixed_lengths if not is_count(k, least=1)]:
        raise UserError(f"fixed length {wrong[0]} is no count of at least 1; it says how many tokens are drafted, for example 4.")
    if wrong := [r for r in cfg.ratios if not is_number(r) or not r > 1]:
        raise UserError(
            f"ratio {wrong[0]} is not above 1; it says how many draft steps a forward pass of the target costs, for example 10."
        )
    check_costs(cfg.costs)
    if "fixed_length" not in (cfg.get("stopping") or {}):
        raise UserError(
            "stopping leaves out fixed_length, over which every gain is stated; add it, for example "
            "'stopping=[fixed_length,head_threshold]', or use stopping=all."
        )
    check_rules(rule_choices(cfg.stopping))
    counts = {key: cfg[key] for key in ("num_prompts", "num_dev_prompts", "max_new_tokens")}
    check_counts(counts | {f"record.{key}": cfg.record[key] for key in ("num_samples", "batch_size")})
    known_data_sets(cfg.test_sets or {})
    check_data(cfg)
    check_split(cfg)


def check_costs(costs: Any) -> None:
    """Raise UserError for what is wrong with conf/replay.yaml's `costs`."""
    if not isinstance(costs, DictConfig):
        raise UserError(
            f"costs={costs} is no set of keys; expected {' and '.join(COSTS)}, for example 'costs.head_share=0.1', or leave it out."
        )
    for key, value in costs.items():
        if key not in COSTS:
            raise UserError(
                f"costs.{key}={value} is not known; costs has {' and '.join(COSTS)}: use one of them, or leave it out."
            )
        if not (is_share(value) or (key == "head_share" and value is None)):
            raise UserError(f"costs.{key}={value}: expected a number of at least 0, a share of a {COSTS[key]}, for example 0.1.")
    if missing := [key for key in COSTS if key not in costs]:
        raise UserError(f"costs.{missing[0]} is missing; give it a share of a {COSTS[missing[0]]}, for example 0.1.")


def can_replay(drafting: Drafting, verification: VerificationRule) -> bool:
    """Whether a recording predicts what such drafts come to: chains under token verification; all else can only be decoded."""
    return isinstance(verification, TokenVerification) and isinstance(drafting, Autoregressive)


def check_decoded(cfg: DictConfig, drafting: Drafting, verification: VerificationRule) -> None:
    """Raise UserError if what can only be decoded would be decoded for nothing: where `live_rules` drafts nothing, or always as much.

    The costs of draft and target are told apart by rounds that draft different numbers of tokens.
    """
    if can_replay(drafting, verification):
        return
    lengths = set()
    for name, choice in rule_choices(cfg.stopping).items():
        if name in cfg.live_rules and (cfg.head is not None or not takes_head(choice)):
            lengths |= _lengths(choice)
    if verification.stopping is not None:
        lengths.add(None)
    what = f"{type(drafting).__name__.lower()} drafts under {verification.label} are only decoded, rule by rule of live_rules"
    if not lengths:
        without = ", of which none drafts without a head" if cfg.head is None else ""
        raise UserError(
            f"live_rules={list(cfg.live_rules)} leaves nothing to decode but the target alone: {what}{without} and with values that "
            "stopping= gives; take for example 'live_rules=[fixed_length]'."
        )
    if drafting.reads_draft and len(lengths) == 1 and lengths != {None}:
        raise UserError(
            f"live_rules={list(cfg.live_rules)} drafts {lengths.pop()} tokens in every round, from which the costs of draft and target "
            f"cannot be told apart: {what}; give at least two lengths, for example 'fixed_lengths=[4,8]', or add a rule of varying length."
        )


def rule_choices(stopping: DictConfig) -> dict[str, RuleChoice]:
    """Return the classes and arguments of a composed `stopping` config, by name."""
    choices = {}
    for name, arguments in OmegaConf.to_container(stopping, resolve=True).items():
        choices[name] = RuleChoice(get_class(arguments.pop("_target_")), arguments)
    return choices


def _lengths(choice: RuleChoice) -> set[int | None]:
    """Return how many tokens a rule drafts in a round, by its values: None where that varies."""
    rule = choice.arguments
    values = {key: [one for one in value if one != "auto"] for key, value in rule.items() if isinstance(value, list)}
    if not all(values.values()):  # nothing but auto, which needs a recording
        return set()
    if choice.cls is FixedLength:
        return set(values.get("num_tokens", [rule["num_tokens"]]))
    return {None}


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
