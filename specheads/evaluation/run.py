"""The steps of an evaluation: record, judge, replay, choose on dev prompts, decode the chosen, put together.

Everything long is kept as it comes: recordings in the data folder, decoded prompts in journals of the run's folder.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from data_gen.run import GenerationSettings
from specheads.decoding.drafting import Drafting
from specheads.decoding.engine import resolve_engine
from specheads.decoding.stopping import MAX_TOKENS, FixedLength, HeadThreshold
from specheads.decoding.verification import VerificationRule
from specheads.errors import UserError
from specheads.evaluation import offline
from specheads.evaluation.candidate import FIXED, Candidate, RuleChoice
from specheads.evaluation.candidates import candidates, longest_draft, takes_head
from specheads.evaluation.checks import can_replay, rule_choices
from specheads.evaluation.find import LocatedHead, store_in_config
from specheads.evaluation.findings import BOUNDS, notes_on
from specheads.evaluation.intervals import gain_over_fixed
from specheads.evaluation.machine import device_name, load_average, versions
from specheads.evaluation.offline import Choices, Recorded
from specheads.evaluation.prompt_sets import PromptSets
from specheads.evaluation.recorded import recorded
from specheads.evaluation.report import live_rows
from specheads.evaluation.results import MEASURED, DataSet, Report
from specheads.evaluation.rule_costs import CostTable, with_measured
from specheads.evaluation.sweep import TARGET_ALONE, Measured, Setting, run_sweep, sweep_settings
from specheads.evaluation.trust import REMEDY, doubts_of
from specheads.evaluation.tuning import Tuning
from specheads.forecast import progress
from specheads.heads.cost import counted_share
from specheads.pair import Pair
from specheads.prompts.encoding import EncodedPrompt
from specheads.replay.cost import Costs
from specheads.replay.head_scores import head_fingerprint
from specheads.replay.recording import Recording
from specheads.replay.replay import recorded_head, replay
from specheads.replay.response_tree import RecordSettings
from specheads.sampling import Warp
from specheads.storage.journal import Journal
from specheads.storage.runs import is_resumed

logger = logging.getLogger(__name__)

PROBES, NUM_PROBED = (1, 4, 12), 4  # fixed lengths decoded on so many dev prompts, to know the costs before rules are chosen
MOST_TURNS = 4  # of choosing rules and decoding them
NUM_OTHERS = 2  # rules without a head whose drafts are shown in detail


class Evaluation:
    """One evaluation of one pair; `cfg` is the composed conf/evaluate.yaml, already checked."""

    def __init__(
        self,
        cfg: DictConfig,
        pair: Pair,
        heads: Mapping[str, LocatedHead],
        drafting: Drafting,
        verification: VerificationRule,
        others: Mapping[str, VerificationRule],
    ) -> None:
        self.cfg, self.pair, self.drafting, self.verification, self.others = cfg, pair, drafting, verification, others
        self.found, self.prompts = heads, PromptSets(cfg, pair, heads)
        self.heads = {name: one.head for name, one in heads.items()}
        self.warp, self.folder = Warp(**cfg.warp), Path(cfg.paths.run)
        self.stopping = {name: choice for name, choice in rule_choices(cfg.stopping).items() if heads or not takes_head(choice)}
        self._recommended: dict[Path, dict[str, float] | None] = {}
        self._undecoded: list[str] = []
        self._load = load_average()
        self.ratios = {f"{ratio:g}": Costs.at_ratio(ratio, cfg.costs.verified_share) for ratio in cfg.ratios}
        self.head_sizes = {name: counted_share(head, pair.draft_lm) for name, head in self.heads.items()}
        given = cfg.costs.head_share
        self.head_shares = self.head_sizes if given is None else dict.fromkeys(self.heads, given)

    def run(self) -> Report:
        """Do all steps; return the report."""
        if not can_replay(self.drafting, self.verification):
            logger.info(
                "%s drafts under %s are decoded, rule by rule of live_rules: a recording foretells chains under token verification only",
                type(self.drafting).__name__.lower(),
                self.verification.label,
            )
            return self._decode_only()
        if self.drafting.ahead:
            logger.warning("drafting.ahead=true spends a draft forward more in most rounds, which replayed counts leave out")
        recordings = self.record()
        probed = self._probe() if self.cfg.live != "none" else []
        cost_table = self._measured_costs(probed) if probed else self.counted_costs()
        (_, dev), *_ = recordings.values()
        tuning = Tuning(dev, cost_table)
        found = candidates(self.stopping, self.heads, tuning)
        tables = self.replay(recordings, found)
        choices = offline.choose(tables[0], found, cost_table)
        if not probed:
            return self._report(found, tables, choices, cost_table, [])
        return self._report(*self._settle(tuning, found, tables, choices, probed))

    # Recordings

    def record(self) -> dict[str, tuple[str, Recording]]:
        """Return by name the role and the recording of every set of prompts, dev prompts first."""
        cfg = self.cfg
        sets = self.prompts.recorded()
        longest = max(longest_draft(self.stopping), MAX_TOKENS)  # so that fewer rules need no other recording
        settings = RecordSettings(cfg.record.num_samples, longest, cfg.record.batch_size)
        generation = GenerationSettings(cfg.max_new_tokens, cfg.data.max_prompt_tokens, **cfg.generation)
        prompts, heads = {name: one.prompts for name, one in sets.items()}, list(self.heads.values())
        found = recorded(cfg, self.pair, prompts, generation, settings, heads, cfg.record.ground_truth)
        return {name: (sets[name].role, recording) for name, recording in found.items()}

    def replay(self, recordings: Mapping[str, tuple[str, Recording]], found: Sequence[Candidate]) -> list[Recorded]:
        """Return what every rule spent on every recording."""
        with progress("replaying", len(recordings) * len(found)) as advance:
            return [
                Recorded.of(name, role, recording, found, advance, self.prompts.groups_of(recording.prompt_ids))
                for name, (role, recording) in recordings.items()
            ]

    # Decoding

    def _probe(self) -> list[Measured]:
        """Decode a few dev prompts with fixed lengths, and with the smallest and the largest head."""
        settings = [TARGET_ALONE, *(Setting(f"fixed K={k}", FIXED, k, FixedLength(k)) for k in PROBES)]
        sizes = sorted(self.heads, key=self.head_sizes.__getitem__)
        for name in dict.fromkeys(sizes[:1] + sizes[-1:]):
            settings.append(Setting(f"head {name}", "head_threshold", 0.5, HeadThreshold(self.heads[name], 0.5), head=name))
        return self._sweep("costs", settings, self.prompts.dev.first(NUM_PROBED).prompts)

    def _settle(
        self, tuning: Tuning, found: list[Candidate], tables: list[Recorded], choices: Choices, probed: Sequence[Measured]
    ) -> tuple[list[Candidate], list[Recorded], Choices, CostTable, list[Measured]]:
        """Decode the chosen rules, fit the costs to what that took, and choose again, until what is chosen was decoded.

        All of a turn's settings are decoded side by side, so that a slow minute falls on all of them. What rules take from the measured
        costs, such as automatic thresholds, is fitted again after the first turn, whose rounds are many more than the probe's. On a busy
        machine costs settle nowhere, so one turn is enough to say so.
        """
        settings, turn = self._settings(found, choices), 0
        while True:
            turn += 1
            measured = self._decode(settings, "generations" if turn == 1 else f"generations-turn-{turn}")
            cost_table = self._measured_costs([*probed, *measured])
            if turn == 1:
                found, tables = self._tuned_again(replace(tuning, cost_table=cost_table), found, tables)
            choices, decoded = offline.choose(tables[0], found, cost_table), {one.name for one in settings}
            missing = [one for one in self._settings(found, choices) if one.name not in decoded]
            busy = doubts_of(measured[0], cost_table.fit, (), len(measured[0].stats)) if missing else ()
            if self._decodes_all or not missing or busy or turn == MOST_TURNS:
                self._undecoded = [one.name for one in missing]
                return found, tables, choices, cost_table, measured
            settings = [*settings, *missing]
            logger.info("at the costs of these rounds other rules are best: %s", ", ".join(one.name for one in missing))

    def _tuned_again(
        self, tuning: Tuning, found: Sequence[Candidate], tables: Sequence[Recorded]
    ) -> tuple[list[Candidate], list[Recorded]]:
        """Return the candidates and their replays with those that are meant for the measured costs fitted to the costs at hand."""
        fresh = {number: one for number, one in enumerate(candidates(self.stopping, self.heads, tuning)) if one.ratio == MEASURED}
        if not fresh:
            return list(found), list(tables)
        recordings = {table.name: (table.role, table.recording) for table in tables}
        replayed = self.replay(recordings, list(fresh.values()))
        new = []
        for table, again in zip(tables, replayed, strict=True):
            counts = list(table.counts)
            for number, own in zip(fresh, again.counts, strict=False):
                counts[number] = own
            new.append(replace(table, counts=counts))
        return [fresh.get(number, one) for number, one in enumerate(found)], new

    def counted_costs(self) -> CostTable:
        """Return what rules cost at the ratios, where nothing is measured."""
        return CostTable(self.ratios, self.head_shares)

    def _measured_costs(self, measured: Sequence[Measured]) -> CostTable:
        """Return what rules cost at the ratios, and as it was measured."""
        return with_measured(self.counted_costs(), measured, self.head_sizes)

    def _settings(self, found: Sequence[Candidate], choices: Choices) -> list[Setting]:
        """Return what is decoded: the best of each kind at the measured costs, or all rules that the config names."""
        if self._decodes_all:
            wanted = [one for one in found if one.family.split()[0] in self.cfg.live_rules]
            return sweep_settings(wanted, others=self.others)
        best = {family: number for family, number in choices.best[MEASURED].items() if family not in BOUNDS}
        kinds = [[best[FIXED]]] if FIXED in best else []
        rest = [number for family, number in best.items() if family != FIXED]
        kinds += [[n for n in rest if found[n].head is not None], [n for n in rest if found[n].head is None]]
        speeds = choices.speeds[MEASURED]
        return sweep_settings([found[max(kind, key=speeds.__getitem__)] for kind in kinds if kind])

    @property
    def _decodes_all(self) -> bool:
        return self.cfg.live == "all" or bool(self.others)

    def _decode(self, settings: Sequence[Setting], name: str = "generations") -> list[Measured]:
        if self.cfg.baseline == "mjgd":
            block, beams = self.cfg.block, self.cfg.beams
            title = f"MJGD of {block} tokens, {beams} beams, lossy"
            settings = [*settings, Setting(title, "mjgd", None, None, search=(block, beams))]
        return self._sweep(name, settings, self.prompts.decoded().prompts)

    def _sweep(self, name: str, settings: Sequence[Setting], prompts: Sequence[EncodedPrompt]) -> list[Measured]:
        """Decode with every setting; what is done is kept in the journal `name`."""
        cfg, pair, total = self.cfg, self.pair, len(settings) * len(prompts) * self.cfg.repeats
        logger.info(
            "%s: %d settings x %d prompts x %d repeats = %d responses of at most %d tokens, into %s",
            *(name, len(settings), len(prompts), cfg.repeats, total, cfg.max_new_tokens, self.folder),
        )
        path = self.folder / f"{name}.jsonl"
        if not is_resumed(self.folder):
            path.unlink(missing_ok=True)
        journal = Journal(path, self._provenance(settings, prompts))
        with progress("decoding", total) as advance:
            return run_sweep(
                pair,
                settings,
                [ids for _, ids in prompts],
                self.warp,
                max_new_tokens=cfg.max_new_tokens,
                repeats=cfg.repeats,
                seed=cfg.seed,
                engine=cfg.engine,
                drafting=self.drafting,
                verification=self.verification,
                on_generation=advance,
                journal=journal,
                window=min(pair.window, cfg.data.max_prompt_tokens + cfg.max_new_tokens),
            )

    def _provenance(self, settings: Sequence[Setting], prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
        """Return what decides the content of a journal."""
        cfg, pair = self.cfg, self.pair
        return {
            "settings": [(one.name, repr(one.verification and one.verification.compile_key)) for one in settings],
            "prompts": [ids for _, ids in prompts],
            "seed": cfg.seed,
            "pair": [pair.target_revision, pair.draft_revision],
            "heads": [(head_fingerprint(head), head.config.calibration) for head in self.heads.values()],
            "repeats": cfg.repeats,
            "warp": OmegaConf.to_container(cfg.warp),
            "max_new_tokens": cfg.max_new_tokens,
            "device": device_name(pair),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "engine": resolve_engine(cfg.engine),
            "drafting": OmegaConf.to_container(cfg.drafting),
            "verification": self.verification.label,
            "dtype": [str(pair.target.dtype), str(pair.draft.dtype)],
        }

    def _decode_only(self) -> Report:
        """Decode every rule of `live_rules`, with no recording."""
        if self.cfg.live == "none":
            raise UserError(
                f"live=none, but {type(self.drafting).__name__.lower()} drafts under {self.verification.label} can only be decoded; use live=all."
            )
        chosen = {name: rule for name, rule in self.stopping.items() if name in self.cfg.live_rules}
        found = candidates(without_auto(chosen), self.heads, None)
        settings = sweep_settings(found, self.verification.stopping, self.others)
        measured = self._decode(settings)
        return self._report(found, [], None, self._measured_costs(measured), measured)

    # The report

    def _report(
        self,
        found: Sequence[Candidate],
        tables: Sequence[Recorded],
        choices: Choices | None,
        cost_table: CostTable,
        measured: Sequence[Measured],
    ) -> Report:
        same_prompts = tables and len(measured[0].stats if measured else ()) <= tables[1].recording.num_prompts
        replayed = self._replayed_speeds(found, tables, measured, cost_table) if measured and same_prompts else {}
        groups = self.prompts.decoded().groups if measured else []
        live = live_rows(measured, cost_table, self.verification.lossless, replayed, groups) if measured else []
        # The winners at the measured ratio are not those of others.
        fair = [MEASURED] if choices is not None and not self._decodes_all else cost_table.costs
        gains = (
            {ratio: gain_over_fixed(measured, partial(cost_table.of, ratio=ratio), groups) for ratio in fair} if measured else {}
        )
        judges = {name: recorded_head(head) for name, head in self.heads.items()}
        sets, ranking = [], []
        for table in tables:
            data = offline.data_set(table, found, choices, cost_table)
            sets.append(replace(data, reliability=offline.reliability(table.recording, judges)))
        if tables:
            sets[1] = self._detailed(sets[1], tables[1].recording, found, choices)
            ranking = offline.bank(judges, tables[1], found, choices, cost_table) if len(judges) > 1 else []
            self._note_recommended(found, choices, sets[1])
        doubts = doubts_of(measured[0], cost_table.fit, live, len(set(groups))) if measured else []
        if self._undecoded:
            doubts.append(
                f"The measured costs did not settle, so {', '.join(self._undecoded)} stayed without decoding; {REMEDY}."
            )
        report = Report(self.context(measured), cost_table.fit, doubts, live, gains, sets, ranking)
        return replace(report, notes=[*notes_on(report), *self.prompts.notes()])

    def _replayed_speeds(
        self, found: Sequence[Candidate], tables: Sequence[Recorded], measured: Sequence[Measured], cost_table: CostTable
    ) -> dict[str, float]:
        """Return tokens per second of decoded rules on the decoded test prompts, by replayed counts and what their own rounds cost."""
        some, speeds, named = slice(0, self.cfg.num_live_prompts), {}, {one.name: number for number, one in enumerate(found)}
        for one in measured:
            if one.setting.name in named and one.setting.verification is None:
                number = named[one.setting.name]
                counts, each = tables[1].counts[number], cost_table.for_prompts(found[number], len(one.stats))
                seconds = [
                    float(costs.seconds(counts.drafted[prompt], counts.rounds[prompt])) for prompt, costs in enumerate(each)
                ]
                speeds[one.setting.name] = counts.tokens[some].sum() / sum(seconds)
        return speeds

    def _detailed(self, data: DataSet, recording: Recording, found: Sequence[Candidate], choices: Choices) -> DataSet:
        """Return `data` with drafts by position and responses in color, for the best rules of each kind."""
        ratio = choices.middle
        best = [number for family, number in choices.best[ratio].items() if family not in BOUNDS]
        fixed = [number for number in best if found[number].family == FIXED]
        order = sorted(set(best) - set(fixed), key=lambda number: -choices.speeds[ratio][number])
        heads = [number for number in order if found[number].head is not None][:1]
        others = [number for number in order if found[number].head is None][:NUM_OTHERS]
        shown = [found[number] for number in fixed + heads + others]
        rounds = replay(recording, [one.rule for one in shown])
        texts = [
            sample for pair in zip(shown, rounds, strict=True) for sample in offline.text_samples(self.pair, recording, *pair)
        ]
        places = [offline.positions(*pair) for pair in zip(shown, rounds, strict=True)]
        return replace(data, positions=places, texts=texts)

    def recommend(self, report: Report) -> None:
        """Store the threshold that was best on dev prompts in each local head, for threshold=auto, if it is this draft's own, if it pays
        for itself, and if what was measured can be trusted.
        """
        if self.cfg.any_draft:
            return
        for where, values in self._recommended.items():
            if report.doubts:
                logger.warning("no threshold was stored in %s, because the measured costs are not to be trusted", where)
                continue
            try:
                store_in_config(where, recommended=values)
            except OSError as error:
                logger.warning("nothing could be stored in %s (%s)", where, error.strerror)
                continue
            if values is None:
                logger.info("%s does not pay for itself: it recommends no threshold", where)
            else:
                logger.info("%s now recommends threshold %g, for threshold=auto", where, values["threshold"])

    def _note_recommended(self, found: Sequence[Candidate], choices: Choices, data: DataSet) -> None:
        """Keep for each local head the threshold that was best on dev prompts, or None where no threshold beats the best fixed length."""
        ratio = MEASURED if MEASURED in choices.best else choices.middle
        for name, one in self.found.items():
            family = f"head_threshold {name}" if len(self.found) > 1 else "head_threshold"
            number = choices.best[ratio].get(family)
            if number is None or not Path(one.where).is_dir():
                continue
            rule, row, speeds = found[number].live, data.rules[number], choices.speeds[ratio]
            values = {"threshold": rule.threshold, "min_tokens": rule.min_tokens, "max_tokens": rule.max_tokens}
            pays = speeds[number] > speeds[choices.best[ratio][FIXED]]
            self._recommended[Path(one.where)] = values | {"predicted_speedup": row.speedup[ratio].value} if pays else None

    def context(self, measured: Sequence[Measured] = ()) -> dict[str, Any]:
        """Return what is evaluated, where and how; `measured` is what was decoded."""
        cfg, pair = self.cfg, self.pair
        return {
            "model": pair.name,
            "target": pair.target_id,
            "target_revision": pair.target_revision,
            "draft": pair.draft_id,
            "heads": [one.where for one in self.found.values()],
            "warp": dict(cfg.warp),
            "max_new_tokens": cfg.max_new_tokens,
            "seed": cfg.seed,
            "num_live_prompts": len(measured[0].stats) if measured else 0,
            "repeats": cfg.repeats,
            "verification": self.verification.label,
            "lossless": self.verification.lossless,
            "costs": {
                "verified_share": cfg.costs.verified_share,
                "head_shares": self.head_shares,
                "counted": cfg.costs.head_share is None,
            },
            "device": device_name(pair),
            "threads": torch.get_num_threads(),
            "load": {"start": self._load, "end": load_average()},
            "versions": versions(),
            **self.prompts.context(),
            "config": OmegaConf.to_yaml(cfg, resolve=True),
        }


def without_auto(rules: Mapping[str, RuleChoice]) -> dict[str, RuleChoice]:
    """Return rules without the value `auto`, which needs a recording."""

    def fixed(value: Any) -> Any:
        return [v for v in value if v != "auto"] if isinstance(value, list) else value

    return {
        name: replace(choice, arguments={key: fixed(value) for key, value in choice.arguments.items()})
        for name, choice in rules.items()
    }
