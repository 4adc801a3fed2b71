"""The steps of an evaluation: record, judge, replay, choose on dev prompts, decode the chosen, put together.

Everything long is kept as it comes: recordings in the data folder, decoded prompts in journals of the run's folder.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from data_gen.run import EncodedPrompt, GenerationSettings
from specheads.decoding.drafting import Autoregressive, Drafting
from specheads.decoding.engine import resolve_engine
from specheads.decoding.stopping import MAX_TOKENS, FixedLength
from specheads.decoding.verification import TokenVerification, VerificationRule
from specheads.errors import UserError
from specheads.evaluation import offline
from specheads.evaluation.candidates import FIXED, Candidate, Tuning, candidates, longest_draft, takes_head
from specheads.evaluation.find import FoundHead, prompts_of, prompts_of_set, store_in_config
from specheads.evaluation.findings import BOUNDS, notes_on
from specheads.evaluation.intervals import gain_over_fixed
from specheads.evaluation.journal import Journal
from specheads.evaluation.machine import device_name, versions
from specheads.evaluation.offline import Choices, Prices, Recorded
from specheads.evaluation.recorded import recorded
from specheads.evaluation.report import live_rows
from specheads.evaluation.results import MEASURED, DataSet, Report
from specheads.evaluation.sweep import TARGET_ALONE, Measured, Setting, round_times, run_sweep, sweep_settings
from specheads.forecast import progress
from specheads.pair import Pair
from specheads.replay.cost import Costs, fit_costs, own_costs
from specheads.replay.judge import head_fingerprint
from specheads.replay.record import RecordSettings
from specheads.replay.recording import Recording
from specheads.replay.replay import recorded_head, replay
from specheads.runs import is_resumed
from specheads.sampling import Warp

logger = logging.getLogger(__name__)

PROBES, NUM_PROBED = (1, 8), 4  # fixed lengths decoded on so many dev prompts, to know the costs before rules are chosen
NUM_OTHERS = 2  # rules without a head whose drafts are shown in detail


class Evaluation:
    """One evaluation of one pair; `cfg` is the composed conf/evaluate.yaml, already checked."""

    def __init__(
        self,
        cfg: DictConfig,
        pair: Pair,
        heads: Mapping[str, FoundHead],
        drafting: Drafting,
        verification: VerificationRule,
        others: Mapping[str, VerificationRule],
    ) -> None:
        self.cfg, self.pair, self.drafting, self.verification, self.others = cfg, pair, drafting, verification, others
        self.found = heads
        self.heads = {name: one.head for name, one in heads.items()}
        self.warp, self.folder = Warp(**cfg.warp), Path(cfg.paths.run)
        rules = OmegaConf.to_container(cfg.stopping, resolve=True)
        self.stopping = {name: rule for name, rule in rules.items() if heads or not takes_head(rule)}
        self._recommended: dict[Path, dict[str, float]] = {}
        self.ratios = {f"{ratio:g}": Costs.at_ratio(ratio) for ratio in cfg.ratios}

    def run(self) -> Report:
        """Do all steps; return the report."""
        if not isinstance(self.verification, TokenVerification) or not isinstance(self.drafting, Autoregressive):
            logger.info(
                "%s drafts under %s are decoded, rule by rule of live_rules: a recording foretells chains under token verification only",
                type(self.drafting).__name__.lower(),
                self.verification.label,
            )
            return self._decode_only()
        if self.drafting.ahead:
            logger.warning("drafting.ahead=true spends a draft forward more in most rounds, which replayed counts leave out")
        recordings = self.record()
        prices = self._probe()
        (_, dev), *_ = recordings.values()
        found = candidates(self.stopping, self.heads, Tuning(dev, prices.costs))
        tables = self.replay(recordings, found)
        choices = offline.choose(tables[0], found, prices)
        measured = self._decode(self._settings(found, choices)) if self.cfg.live != "none" else []
        if measured:
            prices = self._prices(measured)
        return self._report(found, tables, choices, prices, measured)

    # Recordings

    def record(self) -> dict[str, tuple[str, Recording]]:
        """Return by name the role and the recording of every set of prompts, dev prompts first."""
        cfg = self.cfg
        name = Path(str(cfg.data.get("path") or self.pair.name)).stem
        sets = {f"{name}, dev": ("dev", prompts_of(cfg, self.pair, "dev", cfg.num_dev_prompts))}
        sets[name] = ("test", prompts_of(cfg, self.pair, "test", cfg.num_prompts))
        for other, path in (cfg.test_sets or {}).items():
            sets[other if other != name else f"{other}, more"] = ("test", prompts_of_set(cfg, self.pair, other, path))
        longest = max(longest_draft(self.stopping), MAX_TOKENS)  # so that fewer rules need no other recording
        settings = RecordSettings(cfg.record.num_draws, longest, cfg.record.batch_size)
        generation = GenerationSettings(cfg.max_new_tokens, cfg.data.max_prompt_tokens, **cfg.generation)
        prompts, heads = {key: prompts for key, (_, prompts) in sets.items()}, list(self.heads.values())
        found = recorded(cfg, self.pair, prompts, generation, settings, heads, cfg.record.truth)
        return {key: (sets[key][0], recording) for key, recording in found.items()}

    def replay(self, recordings: Mapping[str, tuple[str, Recording]], found: Sequence[Candidate]) -> list[Recorded]:
        """Return what every rule spent on every recording."""
        with progress("replaying", len(recordings) * len(found)) as advance:
            return [Recorded.of(name, role, recording, found, advance) for name, (role, recording) in recordings.items()]

    # Decoding

    def _probe(self) -> Prices:
        """Return the costs at the wanted ratios, and the measured ones by decoding a few dev prompts with fixed lengths."""
        if self.cfg.live == "none":
            return Prices(self.ratios)
        settings = [TARGET_ALONE, *(Setting(f"fixed K={k}", FIXED, k, FixedLength(k)) for k in PROBES)]
        prompts = prompts_of(self.cfg, self.pair, "dev", NUM_PROBED)
        return self._prices(self._sweep("costs", settings, prompts))

    def _prices(self, measured: Sequence[Measured]) -> Prices:
        costs = fit_costs(round_times(measured))
        alone = measured[0].stats
        per_second = sum(part.num_tokens for part in alone) / sum(part.decode_seconds for part in alone)
        return Prices({MEASURED: costs, **self.ratios}, per_second)

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

    def _decode(self, settings: Sequence[Setting]) -> list[Measured]:
        if self.cfg.baseline == "mjgd":
            block, beams = self.cfg.block, self.cfg.beams
            name = f"MJGD of {block} tokens, {beams} beams, lossy"
            settings = [*settings, Setting(name, "mjgd", None, None, search=(block, beams))]
        return self._sweep("generations", settings, prompts_of(self.cfg, self.pair, "test", self.cfg.num_live_prompts))

    def _sweep(self, name: str, settings: Sequence[Setting], prompts: Sequence[EncodedPrompt]) -> list[Measured]:
        """Decode with every setting; what is done is kept in the journal `name`."""
        cfg, total = self.cfg, len(settings) * len(prompts) * self.cfg.repeats
        logger.info(
            "%s: %d settings x %d prompts x %d repeats = %d responses of at most %d tokens, into %s",
            *(name, len(settings), len(prompts), cfg.repeats, total, cfg.max_new_tokens, self.folder),
        )
        path = self.folder / f"{name}.jsonl"
        if not is_resumed(self.folder):
            path.unlink(missing_ok=True)
        journal = Journal(path, self._made_of(settings, prompts))
        with progress("decoding", total) as advance:
            return run_sweep(
                self.pair,
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
            )

    def _made_of(self, settings: Sequence[Setting], prompts: Sequence[EncodedPrompt]) -> dict[str, Any]:
        """Return what decides the content of a journal."""
        cfg, pair = self.cfg, self.pair
        return {
            "settings": [(one.name, repr(one.verification and one.verification.program)) for one in settings],
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
        return self._report(found, [], None, self._prices(measured), measured)

    # The report

    def _report(
        self,
        found: Sequence[Candidate],
        tables: Sequence[Recorded],
        choices: Choices | None,
        prices: Prices,
        measured: Sequence[Measured],
    ) -> Report:
        costs = prices.costs.get(MEASURED)
        at = {name: scaled(own, prices.alone) if name == MEASURED else own for name, own in prices.costs.items()}
        same_prompts = tables and len(measured[0].stats if measured else ()) <= tables[1].recording.num_prompts
        replayed = self._replayed_speeds(found, tables, measured, costs) if costs and same_prompts else {}
        live = live_rows(measured, costs, at, self.verification.lossless, replayed) if measured else []
        # The winners at the measured ratio are not those of others.
        fair = at if choices is None or self._decodes_all else {MEASURED: at[MEASURED]} if measured else {}
        gains = {name: gain_over_fixed(measured, own) for name, own in fair.items()} if measured else {}
        judges = {name: recorded_head(head) for name, head in self.heads.items()}
        sets, ranking = [], []
        for table in tables:
            data = offline.data_set(table, found, choices, prices)
            sets.append(replace(data, reliability=offline.reliability(table.recording, judges)))
        if tables:
            sets[1] = self._detailed(sets[1], tables[1].recording, found, choices)
            ranking = offline.bank(judges, tables[1], found, choices, prices) if len(judges) > 1 else []
            self._note_recommended(found, choices, sets[1])
        report = Report(self.context(measured), costs, live, gains, sets, ranking)
        return replace(report, notes=notes_on(report))

    def _replayed_speeds(
        self, found: Sequence[Candidate], tables: Sequence[Recorded], measured: Sequence[Measured], costs: Costs
    ) -> dict[str, float]:
        """Return tokens per second of decoded rules on the decoded test prompts, by replayed counts and what their own rounds cost."""
        some, speeds, named = slice(0, self.cfg.num_live_prompts), {}, {one.name: number for number, one in enumerate(found)}
        for one in measured:
            if one.setting.name in named and one.setting.verification is None:
                counts, own = tables[1].counts[named[one.setting.name]], own_costs(costs, round_times([one]))
                drafted = counts.drafted[some].sum()
                speeds[one.setting.name] = counts.tokens[some].sum() / own.seconds(
                    drafted, counts.target_calls[some].sum(), drafted
                )
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

    def recommend(self) -> None:
        """Store the threshold that was best on dev prompts in each local head, for threshold=auto, if it is this draft's own."""
        for where, values in ({} if self.cfg.any_draft else self._recommended).items():
            try:
                store_in_config(where, recommended=values)
                logger.info("%s now recommends threshold %g, for threshold=auto", where, values["threshold"])
            except OSError as error:
                logger.warning("threshold %g could not be stored in %s (%s)", values["threshold"], where, error.strerror)

    def _note_recommended(self, found: Sequence[Candidate], choices: Choices, data: DataSet) -> None:
        ratio = MEASURED if MEASURED in choices.best else choices.middle
        for name, one in self.found.items():
            family = f"head_threshold {name}" if len(self.found) > 1 else "head_threshold"
            number = choices.best[ratio].get(family)
            if number is None or not Path(one.where).is_dir():
                continue
            rule, row = found[number].live, data.rules[number]
            values = {"threshold": rule.threshold, "min_tokens": rule.min_tokens, "max_tokens": rule.max_tokens}
            self._recommended[Path(one.where)] = values | {"predicted_speedup": row.speedup[ratio].value}

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
            "device": device_name(pair),
            "threads": torch.get_num_threads(),
            "versions": versions(),
            "config": OmegaConf.to_yaml(cfg, resolve=True),
        }


def scaled(costs: Costs, tokens_per_second: float) -> Costs:
    """Return costs in units of the time that the target alone takes for a token, so that a throughput is a speed-up."""
    return Costs(
        *(seconds * tokens_per_second for seconds in (costs.draft_seconds, costs.target_seconds, costs.verified_seconds))
    )


def without_auto(stopping: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rules without the value `auto`, which needs a recording."""
    return {
        name: {key: [v for v in value if v != "auto"] if isinstance(value, list) else value for key, value in rule.items()}
        for name, rule in stopping.items()
    }
