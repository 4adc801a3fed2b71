"""Every head and every rule in one table: the share of the gap that each closes, on the same recordings at the same costs.

    python benchmarks/rules.py                                           # test prompts that were read before
    python benchmarks/rules.py split=final 'data.final_part=[4,5]' 'test_sets={humaneval: humaneval.jsonl}'  # once

Heads are trained by train.py, which a rerun resumes, some of them several times: responses, initial weights and the order of
the prompts differ by seed. Rules are those of conf/stopping and of benchmarks/rival_rules.py. A rule's values, such as its
threshold, are chosen on dev prompts at each cost ratio, among at most as many as the head's threshold has. A head pays for its
computing in every draft step, as counted from its weights. Intervals are over files of prompts and over seeds. A rule of
rival_rules.py that wins somewhere moves into specheads/decoding/stopping.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import open_dict

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.head_kinds import BANKS, all_heads, over_seeds, shown
from benchmarks.results import Column, Table, Value, add_keep_option, prompt_record, text_of, write_result
from benchmarks.rival_rules import RIVALS
from specheads import load_pair
from specheads.commands.evaluation import evaluation_settings, prompt_data
from specheads.evaluation.candidate import CEILING, FIXED, ORACLE, Candidate
from specheads.evaluation.candidates import candidates, takes_head
from specheads.evaluation.head_folders import LocatedHead
from specheads.evaluation.recordings import record
from specheads.evaluation.reliability import logits_in_rounds
from specheads.evaluation.replayed_sets import Choices, ReplayedSet, choose, replay_all
from specheads.evaluation.setup import Setup
from specheads.evaluation.tuning import Tuning
from specheads.heads.metrics import auroc, calibration
from specheads.pair_config import config_folder
from specheads.replay.replay import recorded_head

DISCO = ("head.inputs=[draft_prob,max_prob,entropy,second_prob,index]", "head.depth=1", "head.width=32")
SEVERAL, SINGLE = (0, 1, 2), (0,)
HEADS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {  # by name what train.py is told besides the pair, and the seeds
    "head": ((), SEVERAL),
    "the paper's": (BANKS["defaults"]["the paper's"], SEVERAL),
    "DISCO": (DISCO, SINGLE),
}
GREEDY = ("warp.temperature=0", "generation.responses_per_prompt=2")
THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]
RULES = (
    *("fixed_length", "head_threshold", "online_head", "expected_throughput", "logistic", "logistic3", "online_logistic"),
    *("draft_product", "max_probability", "entropy_threshold", "adaptive_entropy", "confidence", "heuristic"),
    *("accepted_average", "bandit_length"),
)
BY_THRESHOLD = ("logistic", "logistic3", "online_logistic", "draft_product", "max_probability")
VALUES = {  # as many as the head's threshold has
    **{name: {"threshold": THRESHOLDS} for name in BY_THRESHOLD},
    "online_head": {"threshold": THRESHOLDS, "prior": 10},
    "entropy_threshold": {"threshold": [round(0.1 * step, 1) for step in range(3, 22)]},
    "adaptive_entropy": {"target_acceptance": THRESHOLDS},
    "confidence": {"threshold": THRESHOLDS[::2], "retune": [True, False]},
}
COLUMNS = [
    *(Column("pair"), Column("decoding"), Column("prompts"), Column("rule"), Column("values tried", "fixed:0")),
    *(Column("AUROC", "fixed:3"), Column("ECE", "percent:1"), Column("head's cost", "percent:1")),
    Column("speed-up at 10", "ratio:3"),
]
RATIOS = ("5", "10", "20")
for measure in ("of the ceiling", "of the oracle", "gain", "break-even"):
    kind = {"gain": "signed_percent", "break-even": "percent"}.get(measure, "percent")
    COLUMNS += [Column(f"{measure} at {ratio}", kind) for ratio in RATIOS]


@dataclass(frozen=True)
class Ring:
    """One pair and one way of decoding: its heads by name, one for each seed, and all rules on its recordings."""

    pair: str
    greedy: bool
    heads: Mapping[str, Sequence[LocatedHead]]
    setup: Setup
    rules: Sequence[Candidate]
    choices: Choices
    tables: Sequence[ReplayedSet]  # dev first

    @property
    def members(self) -> dict[str, list[str]]:
        """By row of the table the families that it is the mean of: one, or one for each seed."""
        members: dict[str, list[str]] = {}
        for family in next(iter(self.choices.best.values())):
            head = next((head for head in self.setup.heads if f" {head}" in family), None)
            row = family if head is None else family.replace(head, head.rsplit("-", 1)[0])
            members.setdefault(row, []).append(family)
        return members

    def rows(self, table: ReplayedSet) -> list[list[Value]]:
        """Return the figures of every rule on one set of prompts."""
        speeds = {(family, ratio): self._speeds(table, family, ratio) for ratio in RATIOS for family in self.choices.best[ratio]}
        rows = []
        for name, families in self.members.items():
            by_ratio: dict[str, list[Value]] = {}
            for ratio in RATIOS:
                fixed, ceiling, best = (speeds[family, ratio] for family in (FIXED, CEILING, ORACLE))
                ours = over_seeds([speeds[family, ratio] for family in families])
                by_ratio[ratio] = [
                    shown((ours - fixed) / (ceiling - fixed)),
                    shown((ours - fixed) / (best - fixed)),
                    shown(ours / fixed - 1),
                    self._break_even(table, families, ratio, fixed),
                ]
                if ratio == "10":
                    speed = shown(ours)
            tried = sum(rule.family == families[0] and rule.ratio in (None, "10") for rule in self.rules)
            described = [self.pair, "greedy" if self.greedy else "sampled", table.name, name.replace("_", " "), tried]
            figures = [by_ratio[ratio][place] for place in range(4) for ratio in RATIOS]
            rows.append([*described, *self._predictions(table, families), speed, *figures])
        return rows

    def _speeds(self, table: ReplayedSet, family: str, ratio: str) -> np.ndarray:
        number = self.choices.best[ratio][family]
        rule = self.rules[number] if number < len(self.rules) else None
        return self.choices.cost_table.speedup(table.counts[number], table.resamples, rule, ratio)

    def _break_even(self, table: ReplayedSet, families: Sequence[str], ratio: str, fixed: np.ndarray) -> Value:
        """Return the mean over heads of the cost at which a rule is as fast as the best fixed length."""
        numbers = [self.choices.best[ratio][family] for family in families]
        if any(number >= len(self.rules) or self.rules[number].head is None for number in numbers):
            return None
        costs = [
            self.choices.cost_table.break_even(table.counts[number], table.resamples[:1], self.rules[number], ratio, fixed[:1])
            for number in numbers
        ]
        return float(np.mean([cost[0] for cost in costs if cost is not None]))

    def _predictions(self, table: ReplayedSet, families: Sequence[str]) -> list[Value]:
        """Return the mean AUROC, expected calibration error and cost of the heads that rules ask."""
        heads = {head for head in self.setup.heads for family in families if f" {head}" in family}
        if not heads:
            return [None, None, None]
        predicted = [logits_in_rounds(table.recording, recorded_head(self.setup.heads[head]))[1:3] for head in heads]
        ranks = [auroc(logits, labels) for logits, labels in predicted]
        errors = [calibration(torch.sigmoid(logits), labels).ece for logits, labels in predicted]
        return [float(np.mean(each)) for each in (ranks, errors, [self.setup.head_sizes[head] for head in heads])]


def ring(pair: str, greedy: bool, heads: Sequence[str], words: Sequence[str]) -> Ring:
    """Return all rules on the recordings of one pair, training heads and recording responses first if need be."""
    trained = {}
    for name in heads:
        overrides, seeds = HEADS[name]
        bank = f"{name} greedy" if greedy else "default" if name == "head" else name
        by_kind = all_heads(pair, {bank: (*overrides, *(GREEDY if greedy else ()))}, seeds, calibrated=True)
        (trained[name],) = by_kind.values()
    named = {f"{name}-{HEADS[name][1][number]}": head for name in heads for number, head in enumerate(trained[name])}
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        decoding = ["warp.temperature=0"] if greedy else []
        chosen = [f"stopping=[{','.join(RULES)}]", f"thresholds={THRESHOLDS}", f"fixed_lengths={list(range(1, 21))}"]
        cfg = compose("evaluate", [f"model={pair}", *decoding, "live=none", "paths.run=.", *chosen, *words])
    with open_dict(cfg):
        cfg.stopping.update(RIVALS)
        for name, values in VALUES.items():
            cfg.stopping[name].update(values)
    setup = Setup(load_pair(pair), named, evaluation_settings(cfg), prompt_data(cfg), Path(cfg.paths.data), Path(cfg.paths.run))
    recorded, costs = record(setup), setup.counted_costs()
    tuning = Tuning(recorded[0].recording, costs)
    # What learns from how the text goes on corrects the recommended kind of head; the other heads only stop at a threshold.
    first = {name: head for name, head in setup.heads.items() if name.rsplit("-", 1)[0] == heads[0]}
    others = {name: head for name, head in setup.heads.items() if name not in first}
    only = {"head_threshold": setup.rules["head_threshold"]}
    rules = candidates(setup.rules, first, tuning)
    if others:  # a single one would not be named
        more = [rule for rule in candidates(only, others, tuning) if rule.family != CEILING]
        rules += [replace(rule, family=f"head_threshold {rule.head}") for rule in more]
    assert all(takes_head(setup.rules[name]) for name in only)
    tables = replay_all(recorded, rules)
    return Ring(pair, greedy, trained, setup, rules, choose(tables[0], rules, costs), tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs="+", default=["mini", "nano"], help="files of conf/model")
    parser.add_argument("--decoding", nargs="+", choices=("sampled", "greedy"), default=["sampled", "greedy"])
    parser.add_argument("--heads", nargs="+", choices=list(HEADS), default=list(HEADS), metavar="HEAD")
    parser.add_argument("words", nargs="*", help="more words for evaluate.py, such as split=final")
    add_keep_option(parser, "rules")
    given = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    words = ["num_prompts=1000", "num_dev_prompts=200", *given.words]
    rows: list[list[Value]] = []
    for pair in given.pairs:
        for decoding in given.decoding:
            made = ring(pair, decoding == "greedy", given.heads, words)
            for table in made.tables:
                if table.role == "test":
                    rows += made.rows(table)
                    print(text_of(Table("rules", "", COLUMNS, [row for row in rows if row[:3] == rows[-1][:3]])), flush=True)
    prompts, parts = made.setup.prompts, made.setup.prompts.context()["final_parts"]
    read = prompt_record([prompt.prompt_id for prompt, _ in list(prompts.recorded().values())[1].prompts])
    verified = f"{made.setup.settings.costs.verified_share:.0%}"
    title = f"The best of each rule's values on dev prompts; verifying a drafted token at {verified} of a forward pass"
    split = f"final, part {', '.join(map(str, parts))}" if parts else "test, read before"
    table = Table("rules", title, COLUMNS, rows)
    write_result("rules", [table], split=split, seeds=SEVERAL, prompts=read, final_parts=parts, keep=given.keep)


if __name__ == "__main__":
    main()
