"""Which kind of head decides best, once its own cost is counted? Trains banks of heads and compares them by replay.

    python benchmarks/head_kinds.py --result none                                   # test prompts that were read before
    python benchmarks/head_kinds.py --compare recipes --seeds 0 --result head_recipes --tables dev  # chooses the recipe
    python benchmarks/head_kinds.py split=final 'data.final_part=[0,1]'             # once, for the tables
    python benchmarks/head_kinds.py --model mini --compare defaults split=final 'data.final_part=[2,3]'  # once, for the README

Every bank is one command of train.py, which a rerun resumes, for each seed: responses, mixing, initial weights and the
order of the prompts differ. All heads are replayed at every threshold on one recording of dev prompts, where each head's
threshold and the fixed length are chosen at each cost ratio, and on one of the prompts that are reported. A head pays for its own
computing in every draft step, as counted from its weights. Intervals are over files of prompts and over seeds.
"""

import argparse
import json
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, prompt_record, text_of, write_result
from specheads import load_head, load_pair
from specheads.commands.evaluation import evaluation_settings, prompt_data
from specheads.evaluation import intervals
from specheads.evaluation.candidate import CEILING, FIXED, Candidate
from specheads.evaluation.candidates import candidates
from specheads.evaluation.head_folders import LocatedHead
from specheads.evaluation.recordings import record
from specheads.evaluation.reliability import logits_in_rounds
from specheads.evaluation.replayed_sets import Choices, ReplayedSet, choose, replay_all
from specheads.evaluation.rule_costs import CostTable
from specheads.evaluation.setup import Setup
from specheads.evaluation.tuning import Tuning
from specheads.heads.metrics import auroc
from specheads.pair_config import config_folder
from specheads.replay.replay import recorded_head
from specheads.storage.runs import has_ended
from specheads.training.heads.settings import checked_share

OUTPUTS = Path("outputs/head_kinds")
RAW = "calibration=null"  # all heads are compared as training left them; the default's calibration is taken off
ROLLOUTS = ("generation.rollouts_per_response=4", "head.label=rollout", RAW)
OBJECTIVE = "objective:"  # begins the word that names another loss, of head_objectives.py
GRID = ("head.depth=[0,1,3]", "loss.reject_weight=[1.0,6.0]", RAW)
BANKS = {  # by what is compared, and by a bank's name, the overrides of train.py, other than seed and folder
    "kinds": {
        "default": (),
        "next_token": ("head.predicts=next_token", *GRID, "head.width=[32,64,160]", "head.label=[sampled,overlap]"),
        "next_token_narrow": ("head.predicts=next_token", "head.depth=[1,3]", "head.width=[8,16,40]", RAW),
        "input_token_015": ("head.predicts=input_token", "mixing.response_share=0.15", *GRID),
        "input_token_05": ("head.predicts=input_token", "mixing.response_share=0.5", *GRID),
        "next_token_015": ("head.predicts=next_token", "mixing.response_share=0.15", "head.width=160", *GRID),
        "next_token_05": ("head.predicts=next_token", "mixing.response_share=0.5", "head.width=160", *GRID),
    },
    "defaults": {
        "default": (),
        "the paper's": ("head.predicts=input_token", "mixing.response_share=0.15", "loss.reject_weight=6.0", RAW),
    },
    "authors": {
        "default": (),
        "the paper's recipe": ("experiment=specdecpp",),
        "the authors' code": ("experiment=specdecpp_authors",),
        "the authors' code, 24 epochs at 1e-3": ("experiment=specdecpp_authors", "trainer.max_epochs=24", "optimizer.lr=1e-3"),
    },
    "text": {
        "1 response": ("head.width=[20,64]", RAW),
        "1 response, 24 epochs": ("trainer.max_epochs=24", "head.width=[20,64]", RAW),
        "4 responses": ("generation.responses_per_prompt=4", "trainer.max_epochs=6", "head.width=[20,64]", RAW),
        "8 responses": ("generation.responses_per_prompt=8", "trainer.max_epochs=4", "head.width=[20,64]", RAW),
        "4 responses, 16 epochs": ("generation.responses_per_prompt=4", "trainer.max_epochs=16", "head.width=[20,64]", RAW),
        "8 responses, 12 epochs": ("generation.responses_per_prompt=8", "trainer.max_epochs=12", "head.width=[20,64]", RAW),
    },
    "objectives": {
        "cross-entropy": (RAW,),
        "rejections count half": ("loss.reject_weight=0.5", RAW),
        "rejections count twice": ("loss.reject_weight=2.0", RAW),
        "focal": ("objective:focal", RAW),
        "with the calibration error": ("objective:calibrated", RAW),
        "cross-entropy on rollouts": ROLLOUTS,
        "throughput on rollouts": ("objective:throughput", *ROLLOUTS),
    },
    "recipes": {
        "as it is": (RAW,),
        "one drafted token at each position": ("generation.samples_per_position=1", RAW),
        "24 epochs": ("trainer.max_epochs=24", RAW),
        "a rate of 1e-3": ("optimizer.lr=1e-3", RAW),
        "four responses to a prompt": ("generation.responses_per_prompt=4", RAW),
        "four responses, wider": ("generation.responses_per_prompt=4", "head.width=96", RAW),
        "the index in the round and the target's last state": (
            "head.inputs=[hidden,embedding,draft_prob,max_prob,entropy,index,target_hidden]",
            RAW,
        ),
        "rollouts": ("generation.rollouts_per_response=4", "head.label=rollout", "loss.survival_weighted=true", RAW),
    },
}
THRESHOLDS = [round(0.05 * step, 2) for step in range(1, 20)]
RULES = ["stopping=[fixed_length,head_threshold]", f"thresholds={THRESHOLDS}", f"fixed_lengths={list(range(1, 21))}", "live=none"]


@dataclass(frozen=True)
class Kind:
    """What heads of one row have in common; they differ in the seed."""

    bank: str
    predicts: str
    kept: float  # share of response positions that keep the target's token
    label: str
    depth: int
    width: int
    reject_weight: float


def bank_folder(model: str, bank: str, words: Sequence[str], seed: int) -> Path:
    """Return the folder of a bank's heads, training them first if need be."""
    outputs = OUTPUTS / model / re.sub(r"[^\w-]+", "_", bank) / str(seed)
    script = ["train.py"]
    if words and words[0].startswith(OBJECTIVE):
        script, words = ["benchmarks/head_objectives.py", words[0].removeprefix(OBJECTIVE)], words[1:]
    command = [sys.executable, *script, f"model={model}", f"paths.outputs={outputs}", f"seed={seed}", *words]
    if not (runs := finished(outputs, words)):
        print(shlex.join(command[1:]), flush=True)
        subprocess.run(command, check=True)
        runs = finished(outputs, words)
    return runs[-1] / "heads"


def finished(outputs: Path, words: Sequence[str]) -> list[Path]:
    """Return the runs in a folder that have ended and were given these overrides."""
    runs = [path.parent for path in sorted(outputs.glob("head/*/.hydra")) if has_ended(path, outputs)]
    given = {run: OmegaConf.to_container(OmegaConf.load(run / ".hydra" / "overrides.yaml")) for run in runs}
    return [run for run in runs if set(words) <= set(given[run])]


def all_heads(
    model: str, banks: Mapping[str, Sequence[str]], seeds: Sequence[int], calibrated: bool = False
) -> dict[Kind, list[LocatedHead]]:
    """Return the heads of every kind, one for each seed; without their calibration unless `calibrated`."""
    by_kind: dict[Kind, list[LocatedHead]] = {}
    for bank, words in banks.items():
        for seed in seeds:
            heads = bank_folder(model, bank, words, seed)
            share = OmegaConf.load(heads.parent / ".hydra" / "config.yaml").mixing.response_share
            for folder in sorted(heads.glob("*/config.json")):
                config = json.loads(folder.read_text())
                kept = [checked_share(config["predicts"], share)]
                described = (
                    config["predicts"],
                    *kept,
                    config["label"],
                    config["depth"],
                    config["width"],
                    config["train"]["reject_weight"],
                )
                head = load_head(folder.parent)
                if not calibrated:
                    head.config = replace(head.config, calibration=None)
                by_kind.setdefault(Kind(bank, *described), []).append(LocatedHead(head, str(folder.parent)))
    return by_kind


def over_seeds(samples: Sequence[np.ndarray]) -> np.ndarray:
    """Return the mean over seeds of resampled figures, (R,) each: entry 0 over all seeds, the others over resampled seeds."""
    each = np.stack(samples, axis=1)
    drawn = np.random.default_rng(0).multinomial(len(samples), [1 / len(samples)] * len(samples), size=len(each))
    drawn[0] = 1
    return (each * drawn).sum(axis=1) / len(samples)


def shown(samples: np.ndarray) -> dict[str, float]:
    """Return the estimate and the interval of resampled figures."""
    return asdict(intervals.interval(samples))


class Reported:
    """Replayed heads on one set of prompts, at thresholds that were chosen on dev prompts."""

    def __init__(self, table: ReplayedSet, rules: Sequence[Candidate], choices: Choices, cost_table: CostTable) -> None:
        self.table, self.rules, self.choices, self.cost_table = table, rules, choices, cost_table

    def speeds(self, family: str, ratio: str) -> np.ndarray:
        """Return the speed-ups (R,) of the best rule of a family."""
        number = self.choices.best[ratio][family]
        return self.cost_table.speedup(self.table.counts[number], self.table.resamples, self.rules[number], ratio)

    def over_seeds(self, names: Sequence[str], ratio: str) -> np.ndarray:
        """Return the speed-ups (R,) of a kind of head, the mean over its seeds."""
        return over_seeds([self.speeds(f"head_threshold {name}", ratio) for name in names])

    def break_even(self, names: Sequence[str], ratio: str) -> float:
        """Return the mean break-even cost of a kind of head."""
        costs = []
        for name in names:
            number = self.choices.best[ratio][f"head_threshold {name}"]
            of = (self.table.counts[number], self.table.resamples[:1], self.rules[number], ratio, self.speeds(FIXED, ratio)[:1])
            costs.append(float(self.cost_table.break_even(*of)[0]))
        return float(np.mean(costs))

    def auroc(self, heads: Sequence[LocatedHead]) -> float:
        """Return the mean AUROC of heads on drafted tokens, at every index that those can have in a round."""
        predictions = [logits_in_rounds(self.table.recording, recorded_head(located.head)) for located in heads]
        return float(np.mean([auroc(calibrated, labels) for _, calibrated, labels, _ in predictions]))

    def row(self, names: Sequence[str], first: Sequence[str]) -> list:
        """Return the figures of a kind of head, and of its difference from the `first` kind."""
        gains, evens, shares, others = [], [], [], []
        for ratio in self.cost_table.costs:
            ours, fixed, best = self.over_seeds(names, ratio), self.speeds(FIXED, ratio), self.speeds(CEILING, ratio)
            gains.append(shown(ours / fixed - 1))
            shares.append(shown((ours - fixed) / (best - fixed)))
            others.append(shown(ours / self.over_seeds(first, ratio) - 1) if names != first else None)
            evens.append(self.break_even(names, ratio))
        return [self.cost_table.head_shares[names[0]], *gains, *shares, *others, *evens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", choices=BANKS, default="kinds")
    parser.add_argument("--model", default="nano", help="a file of conf/model, on the prompts of the embedded pairs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("words", nargs="*", help="more words for evaluate.py, such as split=final")
    parser.add_argument("--tables", choices=("dev", "test"), nargs="+", default=["dev", "test"], help="prompts to report")
    parser.add_argument(
        "--result", metavar="NAME", help="default: head_kinds, with the model's name if it is not nano; none: keep none"
    )
    arguments = parser.parse_intermixed_args()
    arguments.result = arguments.result or ("head_kinds" if arguments.model == "nano" else f"head_kinds_{arguments.model}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    kinds = all_heads(arguments.model, BANKS[arguments.compare], arguments.seeds)
    by_bank = arguments.compare in ("recipes", "authors", "text", "objectives")
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        words = [f"model={arguments.model}", "num_prompts=1000", "num_dev_prompts=200", *RULES, "paths.run=.", *arguments.words]
        cfg = compose("evaluate", words)
    pair = load_pair(arguments.model)
    names = {kind: [f"{number}-{seed}" for seed in arguments.seeds] for number, kind in enumerate(kinds)}
    heads = {name: head for kind, located in kinds.items() for name, head in zip(names[kind], located, strict=True)}
    setup = Setup(pair, heads, evaluation_settings(cfg), prompt_data(cfg), Path(cfg.paths.data), Path(cfg.paths.run))
    recorded, cost_table = record(setup), setup.counted_costs()
    rules = candidates(setup.rules, setup.heads, Tuning(recorded[0].recording, cost_table))
    tables = replay_all(recorded, rules)
    choices, ratios, first = (
        choose(tables[0], rules, cost_table),
        list(cost_table.costs),
        next(iter(names.values())),
    )
    columns = [Column("trained with")] if by_bank else []
    columns += [Column("predicts"), Column("kept", "fixed"), Column("label"), Column("depth"), Column("width")]
    columns += [Column("reject weight", "fixed:0"), Column("AUROC", "fixed:3"), Column("head's cost", "percent:1")]
    columns += [Column(f"gain at {ratio}", "signed_percent") for ratio in ratios]
    columns += [Column(f"of the gap at {ratio}", "percent") for ratio in ratios]
    columns += [Column(f"over the first row at {ratio}", "signed_percent") for ratio in ratios]
    columns += [Column(f"break-even at {ratio}", "percent") for ratio in ratios]
    fixed_columns = [
        Column("ratio"),
        Column("best fixed length"),
        Column("speed-up", "ratio:3"),
        Column("informed ceiling", "ratio:3"),
    ]
    verification = f"verification of a drafted token at {cfg.costs.verified_share:.0%} of a forward pass"
    costs = f"a head's cost counted from its weights, {verification}"
    results = []
    for table in (each for each in tables if each.role in arguments.tables):
        reported, rows = Reported(table, rules, choices, cost_table), []
        for kind, located in kinds.items():
            described = list(astuple(kind))[0 if by_bank else 1 :]
            rows.append([*described, reported.auroc(located), *reported.row(names[kind], first)])
        fixed = [
            [ratio, rules[choices.best[ratio][FIXED]].name, *(shown(reported.speeds(each, ratio)) for each in (FIXED, CEILING))]
            for ratio in ratios
        ]
        title = f"{table.name}, {table.recording.num_prompts} prompts; {costs}"
        results += [Table(table.role, title, columns, rows), Table(f"{table.role}_fixed", title, fixed_columns, fixed)]
        print(f"\n{title}\n\n{text_of(results[-1])}\n\n{text_of(results[-2])}")
    sets = list(setup.prompts.recorded().values())
    parts = setup.prompts.context()["final_parts"]
    prompts = sets[0 if arguments.tables == ["dev"] else 1].prompts
    split = (
        "dev" if arguments.tables == ["dev"] else f"final, part {', '.join(map(str, parts))}" if parts else "test, read before"
    )
    prompts_read = prompt_record([prompt.prompt_id for prompt, _ in prompts])
    write_result(arguments.result, results, split=split, seeds=arguments.seeds, prompts=prompts_read, final_parts=parts)


if __name__ == "__main__":
    main()
