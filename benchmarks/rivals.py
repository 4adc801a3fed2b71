"""Stopping rules of other papers that are not in the package, replayed beside the ones that are.

    python benchmarks/rivals.py [--model mini] [--head latest] [num_prompts=100 warp.temperature=0 ...]

It is `python evaluate.py live=none` with these keys, and with the rules of RIVALS besides some of conf/stopping. Values are
chosen on dev prompts at each ratio. A rule that wins somewhere moves into specheads/decoding/stopping.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from hydra import compose, initialize_config_dir
from omegaconf import open_dict
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, text_of, write_result
from specheads.commands.compose import load_configured_pair
from specheads.commands.evaluation import config_text, evaluation_settings, prompt_data
from specheads.decoding.arguments import check_probability
from specheads.decoding.stopping.confidence import ConfidenceRule, ConfidenceState
from specheads.decoding.stopping.rule import MAX_TOKENS
from specheads.evaluation.evaluate import evaluate
from specheads.evaluation.head_folders import find_heads
from specheads.evaluation.report import Report
from specheads.pair_config import config_folder
from specheads.prompts.prompt import FINAL

RULES = ("fixed_length", "head_threshold", "logistic", "online_logistic", "bandit_length", "entropy_threshold")


class Played(NamedTuple):
    """What `TapOut` remembers."""

    arm: Tensor  # (B,) long, which rule decides in this round
    plays: Tensor  # (B, A) float64, rounds so far
    rewards: Tensor  # (B, A) float64, the sum of theirs
    last: Tensor  # (B,) float64, the square root of the entropy before this token, negative at the start of a round


class TapOut(ConfidenceRule):
    """Let a bandit (UCB1) choose for each round which of three rules without parameters to fit ends the draft.

    The rules stop where the largest probability is below 0.8; the square root of the entropy is above 0.6; that square root has
    risen by more than 0.2. The reward of a round is `blend accepted / max_tokens + (1 - blend) accepted / drafted`.

    Args:
        blend: in [0, 1], the weight of the share of the longest draft in the reward.
        max_tokens: tokens per round at most.

    Source: sequence-level UCB1 of TapOut (Sridhar et al. 2025, arXiv 2511.02017). A prompt begins without what others taught.
    Left out are the margin of the two largest probabilities, which recordings lack, and the adaptive bound on the entropy, whose
    state would have to follow the rounds of other rules.
    """

    needs = frozenset({"max_prob", "entropy"})
    compile_key = "tapout"
    ARMS = 3

    def __init__(self, blend: float = 0.5, max_tokens: int = MAX_TOKENS) -> None:
        check_probability("blend", blend, "a weight, for example 0.5")
        super().__init__(0.0, max_tokens)
        self.blend = blend

    def initial_memory(self, batch: int, device: torch.device) -> Played:
        plays = torch.zeros(batch, self.ARMS, dtype=torch.float64, device=device)
        arm = torch.zeros(batch, dtype=torch.long, device=device)
        return Played(arm, plays, plays.clone(), torch.full((batch,), -1.0, dtype=torch.float64, device=device))

    def remember(self, state: ConfidenceState, features: Mapping[str, Tensor]) -> Played:
        return state.memory._replace(last=features["entropy"].double().clamp_min(0).sqrt())

    def is_unsure(self, state: ConfidenceState, features: Mapping[str, Tensor]) -> Tensor:
        memory: Played = state.memory
        root = features["entropy"].double().clamp_min(0).sqrt()
        rises = (state.num_drafted > 0) & (root - memory.last > 0.2)
        stops = torch.stack([features["max_prob"] < 0.8, root > 0.6, rises], dim=1)
        return stops.gather(1, memory.arm[:, None]).squeeze(1)

    def learn(self, state: ConfidenceState, num_drafted: Tensor, num_accepted: Tensor) -> ConfidenceState:
        memory: Played = state.memory
        accepted = num_accepted.double()
        reward = self.blend * accepted / self.max_tokens + (1 - self.blend) * accepted / num_drafted.clamp_min(1)
        played = torch.nn.functional.one_hot(memory.arm, self.ARMS).double()
        plays, rewards = memory.plays + played, memory.rewards + played * reward[:, None]
        optimism = (2 * plays.sum(dim=1, keepdim=True).clamp_min(1).log() / plays.clamp_min(1)).sqrt()
        index = torch.where(plays > 0, rewards / plays.clamp_min(1) + optimism, torch.inf)
        return state._replace(memory=memory._replace(arm=index.argmax(dim=1), plays=plays, rewards=rewards))


RIVALS = {"tapout": {"_target_": "benchmarks.rivals.TapOut", "blend": [0.0, 0.5, 1.0], "max_tokens": 20}}


def rows_of(report: Report) -> list[list[Value]]:
    """Return the winner of every family on every data set that is reported, by ratio."""
    rows: list[list[Value]] = []
    for data_set in report.data_sets:
        for row in data_set.winners if data_set.role == "test" else ():
            shares = [None if each is None else asdict(each) for each in (row.gap_ceiling, row.gap_oracle)]
            rows.append([data_set.name, row.family, row.name, row.ratio, asdict(row.speedup), *shares])
    return rows


COLUMNS = [
    *(Column("prompts"), Column("rule"), Column("value"), Column("ratio"), Column("speed-up", "ratio:3")),
    *(Column("of the gap to the ceiling", "percent"), Column("to the oracle", "percent")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--head", default="null", help="a folder of a head, or latest; default: none")
    parser.add_argument("overrides", nargs="*", help="more keys of evaluate.py")
    add_result_option(parser, "rivals")
    given = parser.parse_args()
    words = [
        f"model={given.model}",
        f"head={given.head}",
        f"stopping=[{','.join(RULES)}]",
        "live=none",
        "paths.run=outputs/rivals",
    ]
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("evaluate", [*words, *given.overrides])
    with open_dict(cfg):
        cfg.stopping.update(RIVALS)
    if cfg.split == FINAL:
        parser.error("split=final is read once, for a published figure; rivals are compared on test prompts")
    settings, data, pair = evaluation_settings(cfg), prompt_data(cfg), load_configured_pair(cfg)
    heads = find_heads(settings.head, pair, Path(cfg.paths.outputs), settings.warp)
    report = evaluate(pair, heads, settings, data, (Path(cfg.paths.data), Path(cfg.paths.run)), {}, config_text(cfg))
    table = Table("rules", f"{given.model}, the best rule of each family, chosen on dev prompts", COLUMNS, rows_of(report))
    print(text_of(table))
    write_result(given.result, [table], split=settings.split, seeds=[settings.seed])


if __name__ == "__main__":
    main()
