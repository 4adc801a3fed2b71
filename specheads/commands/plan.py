"""What a command will take: prompts, tokens, time, memory and disk of each stage, before anything
long begins.

Nothing is loaded for it but the configs of the models: times are operations and bytes over the
rates of this machine, which are measured in a moment. Lengths of responses are not known before, so
all figures are for the longest.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from omegaconf import DictConfig
from rich.console import Console
from transformers import PreTrainedModel

from specheads.commands.compose import model_config, settings_of, source_of
from specheads.commands.verbs import Verb
from specheads.data_gen.kept_states import MOST_BYTES, MOST_WORK
from specheads.data_gen.settings import DataGeneration, OwnPrompts
from specheads.decoding.engine.artefacts import folder as compiled_steps
from specheads.decoding.stopping import MAX_TOKENS
from specheads.errors import UserError
from specheads.evaluation.keys import EvaluationKeys
from specheads.evaluation.probe.settings import Probe
from specheads.heads.config import HeadConfig
from specheads.load import memory_in_use
from specheads.pair.config import PairConfig
from specheads.pair.eagle_formats import is_feature_draft
from specheads.pair.feature_draft import FeatureDraft, FeatureLM
from specheads.pair.initial_draft import NewDraft, NewFeatureDraft
from specheads.pair.language_model import LanguageModel, tokenizer_of, weightless_model
from specheads.pair.needs import memory_parts, memory_to_read
from specheads.pair.padding import BATCH_TOKENS
from specheads.pair.source import ModelSource
from specheads.progress import finished, rough_duration
from specheads.prompts.prompt import Prompt, unique
from specheads.prompts.sources import DatasetSource
from specheads.storage.files import amount, space_of
from specheads.table import Table, print_table
from specheads.training.distill.memory import TrainedWeights
from specheads.training.distill.samples import NUM_KEPT, state_bytes
from specheads.training.distill.settings import Distillation
from specheads.training.heads.settings import HeadTraining

logger = logging.getLogger(__name__)

LONG = 3600.0  # seconds, beyond which a command says first how long it takes
_GIB = 2**30
_SAMPLE = 64  # prompts whose tokens are counted
_PROMPT_TOKENS = 100  # of prompts that are not here yet
_OPERATIONS = 40  # small ones in a layer's forward pass
_SAMPLING_PASSES = 10  # over a distribution, to draw a token of it
_BRANCH_TOKENS = 1.5  # that both models read for each sample of a recorded token
_DECODINGS = 6  # of each prompt that an evaluation decodes: by the target alone, and by rules
_LABEL_BYTES = 15  # of a drafted token in a data set
# Compiling, once for a machine: seconds to load the compiler and build operators, and of a step,
# where a small operation takes USUAL_OVERHEAD; and about how many steps a verb needs
_BUILD_SECONDS = 25.0
_STEP_SECONDS = 2.5
_USUAL_OVERHEAD = 5e-6
_STEPS = {"data": 2, "train": 3, "distill": 2, "probe": 12, "evaluate": 20}


@dataclass(frozen=True)
class Stage:
    """A stage of a command, with what it takes at most on this machine."""

    name: str
    prompts: int
    tokens: float
    seconds: float
    memory: float = 0.0  # bytes, the weights not among them
    disk: float = 0.0  # bytes


@dataclass(frozen=True)
class Plan:
    """The stages of a command in order, and what all of them take at most."""

    stages: Sequence[Stage]
    weights: float  # bytes of memory, with what the program takes itself
    prompts: int
    folder: Path  # of the data
    compiling: float = 0.0  # seconds, once for a machine

    @property
    def seconds(self) -> float:
        return self.compiling + sum(stage.seconds for stage in self.stages)

    @property
    def memory(self) -> float:
        """Bytes at the peak."""
        return self.weights + max((stage.memory for stage in self.stages), default=0.0)

    @property
    def disk(self) -> float:
        return sum(stage.disk for stage in self.stages)

    @property
    def short(self) -> str:
        """The plan in a line."""
        return (
            f"{self.prompts:,} prompts, at most {rough_duration(self.seconds)},"
            f" {amount(self.memory)} of memory, {amount(self.disk)} on disk"
        )


def render(plan: Plan, console: Console | None = None) -> None:
    """Print a plan as a table, and how its figures were taken."""
    stages = [*plan.stages, Stage("all", plan.prompts, 0, plan.seconds, plan.memory, plan.disk)]
    if plan.compiling:
        stages.insert(0, Stage("compiling, once per machine", 0, 0, plan.compiling))
    rows = []
    for stage in stages:
        row = [
            stage.name,
            f"{stage.prompts:,}",
            _count(stage.tokens) if stage.tokens else "",
            rough_duration(stage.seconds) if stage.seconds else "",
            amount(stage.memory) if stage.memory >= 1e6 else "",
            amount(stage.disk) if stage.disk >= 1e6 else "",
        ]
        rows.append(row)
    console = console or Console(highlight=False)
    columns = ["stage, at most", "prompts", "tokens", "time", "memory", "disk"]
    print_table(Table.of_texts(columns, rows), console)
    console.print(
        f"memory: of all, with {amount(plan.weights)} for weights and the program; disk:"
        f" {space_of('plan', plan.disk, plan.folder)} in {plan.folder}. Times are operations and"
        " bytes over rates just measured here, if every response has the most tokens; they may be"
        " wrong by a factor of three, and shorter responses take less. What exists is reused."
    )


def announce(plan: Plan) -> None:
    """Print a plan in a line, and warn where it takes more than an hour."""
    if plan.seconds <= LONG:
        finished("plan", plan.short)
        return
    how = (
        "plan: %s; it may take more than an hour: --plan lists the stages; fewer prompts"
        " (data.num_train=, num_prompts=) and shorter responses (data.max_new_tokens=) take less"
    )
    logger.warning(how, plan.short)


def plan_of(verb: Verb, cfg: DictConfig) -> Plan:
    """Return the plan of a verb's composed config.

    Raises UserError for models or prompts that cannot be read.
    """
    if verb.name not in _STAGES:
        raise UserError(f"specheads {verb.name} has no plan; leave out --plan.")
    new = settings_of(Distillation, cfg).initial_draft if verb.name == "distill" else None
    context = _Context(cfg, new)
    stages = _STAGES[verb.name](context, cfg)
    num_prompts = max((stage.prompts for stage in stages), default=0)
    compiling = context.compiling_seconds(_STEPS[verb.name])
    return Plan(stages, context.weights, num_prompts, Path(cfg.paths.data), compiling)


@dataclass(frozen=True)
class Rates:
    """What a device does in a second, and the seconds of a small operation."""

    flops: float
    bandwidth: float  # bytes
    overhead: float

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype) -> "Rates":
        """Measure a device for a few tenths of a second."""
        size = 1024 if device.type == "cpu" else 8192
        square = torch.ones(size, size, device=device, dtype=dtype)
        tall = torch.ones(16 * size, size, device=device, dtype=dtype)
        small = torch.ones(8, 64, device=device, dtype=dtype)
        weight = torch.ones(64, 64, device=device, dtype=dtype)
        product = _usual_seconds(lambda: square @ square, device)
        column = square[0].clone()
        read = _usual_seconds(lambda: tall @ column, device)

        def many() -> None:
            for _ in range(100):
                torch.nn.functional.linear(small, weight)

        num_bytes = tall.numel() * tall.itemsize
        return cls(2 * size**3 / product, num_bytes / read, _usual_seconds(many, device) / 100)


def _usual_seconds(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return median(seconds)  # of this moment, with what other processes take


class _Model:
    """A model without weights, and what its forward passes cost."""

    def __init__(self, model: PreTrainedModel, rates: Rates, source: ModelSource) -> None:
        kind = FeatureLM if isinstance(model, FeatureDraft) else LanguageModel
        self.lm = kind(model)
        self.rates = rates
        self.num_weights = self.lm.model.num_parameters()
        self.num_bytes = self.num_weights * source.bytes_per_weight(model.dtype)

    def pass_seconds(self, num_tokens: float) -> float:
        """Return the seconds of a forward pass of so many tokens, and of a distribution of each."""
        sampling = _SAMPLING_PASSES * num_tokens * self.lm.vocab_size * 4
        work = max(
            self.num_bytes / self.rates.bandwidth,
            2 * num_tokens * self.num_weights / self.rates.flops,
        )
        calls = len(self.lm.layer_configs) * _OPERATIONS * self.rates.overhead
        return work + sampling / self.rates.bandwidth + calls

    def read_seconds(self, num_tokens: float) -> float:
        """Return the seconds in which it reads texts, in batches."""
        return num_tokens / BATCH_TOKENS * self.pass_seconds(BATCH_TOKENS)

    def memory(self, positions: float = 0, rows: float = BATCH_TOKENS) -> float:
        return sum(memory_parts(self.lm, positions, rows=rows).values())


class _Context:
    """The models, prompts and settings that all stages of a plan read."""

    def __init__(self, cfg: DictConfig, new_draft: NewDraft | None = None) -> None:
        config = model_config(cfg)
        self.data = settings_of(DataGeneration, cfg)
        source = ModelSource.of(config, "target")
        device = torch.device(source.device)
        rates = Rates.measured(device, torch.float32)
        self.rates = rates
        self.is_cpu = device.type == "cpu"
        target = weightless_model(source)
        self.target = _Model(target, rates, source)
        draft = _weightless_draft(config, target, new_draft)
        self.draft = _Model(draft, rates, ModelSource.of(config, "draft"))
        self.reads_target = bool(self.draft.lm.reads_layers)
        self.weights = self.target.num_bytes + self.draft.num_bytes + memory_in_use()
        self.counts, self.prompt_tokens = _prompts(cfg, config)

    def compiling_seconds(self, num_steps: int) -> float:
        """Return in which time steps are compiled that this machine does not have yet."""
        made = len(list(compiled_steps().glob("*")))
        seconds = _STEP_SECONDS * max(0, num_steps - made) + (0 if made else _BUILD_SECONDS)
        return seconds * self.rates.overhead / _USUAL_OVERHEAD

    def of(self, *splits: str) -> int:
        """Return the number of responses to the prompts of some splits."""
        repeats = {"train": self.data.responses_per_prompt}
        return sum(self.counts.get(split, 0) * repeats.get(split, 1) for split in splits)

    def responses(self, num: int, max_new_tokens: int, name: str = "responses") -> Stage:
        """Return the stage in which the target answers `num` prompts."""
        rows = min(self.data.batch_size, max(num, 1))
        steps = -(-num // rows) * max_new_tokens
        seconds = steps * self.target.pass_seconds(rows)
        seconds += self.target.read_seconds(num * self.prompt_tokens)
        longest = rows * (self.prompt_tokens + max_new_tokens)
        memory = self.target.memory(longest, rows)
        tokens = num * max_new_tokens
        return Stage(name, num, tokens, seconds, memory, tokens * 4)

    def texts(self, num: int, max_new_tokens: int) -> float:
        """Return the most tokens of so many prompts with responses."""
        return num * (self.prompt_tokens + max_new_tokens)

    def draft_seconds(self, num_tokens: float) -> float:
        """Return the seconds in which the draft reads texts; where it reads its target, that does,
        too, and the draft makes as many steps as a round has at most.
        """
        if not self.reads_target:
            return self.draft.read_seconds(num_tokens)
        steps = self.draft.read_seconds(MAX_TOKENS * num_tokens)
        return self.target.read_seconds(num_tokens) + steps

    def reading_memory(self, with_target: bool = False) -> float:
        """Return the bytes that this takes; `with_target` of both models."""
        parts = memory_to_read(self.target.lm, self.draft.lm, MAX_TOKENS, with_target)
        return sum(sum(part.values()) for part in parts)

    def labels(self, num: int) -> Stage:
        """Return the stage in which both models read the responses, the target those whose states
        were not kept.
        """
        most = self.data.max_new_tokens
        tokens = self.texts(num, most)
        again = 0.0 if self.reads_target else tokens * (1 - self._share_kept(num * most))
        seconds = self.target.read_seconds(again) + self.draft_seconds(tokens)
        memory = self.reading_memory(with_target=True)
        disk = num * most * self.data.samples_per_position * _LABEL_BYTES
        return Stage("labels", num, tokens, seconds, memory, disk)

    def _share_kept(self, num_tokens: float) -> float:
        """Return of which share of the responses' tokens the target's states are kept."""
        lm = self.target.lm
        of_shard = self.data.rows_per_shard * self.data.max_new_tokens * self.target.num_weights
        if self.is_cpu and self.data.runner == "local" and of_shard <= MOST_WORK:
            num_bytes = num_tokens * lm.hidden_size * lm.output_embedding.weight.itemsize
            return min(1.0, MOST_BYTES / max(num_bytes, 1))
        return 0.0

    def recording(self, num: int, max_new_tokens: int, num_samples: int) -> list[Stage]:
        """Return the stages of recording `num` prompts for replays."""
        answered = self.responses(num, max_new_tokens, "responses to record")
        tokens = self.texts(num, max_new_tokens)
        branches = tokens * (1 + num_samples * _BRANCH_TOKENS)
        seconds = self.draft.read_seconds(branches) + self.target.read_seconds(branches)
        memory = self.draft.memory(self.data.batch_size * tokens / max(num, 1))
        disk = branches * _LABEL_BYTES
        return [answered, Stage("recording", num, branches, seconds, memory, disk)]


def _weightless_draft(
    config: PairConfig, target: PreTrainedModel, new_draft: NewDraft | None
) -> PreTrainedModel:
    """Return the draft of a pair without weights, or what a distillation makes in its place; where
    there is none, the target.
    """
    if new_draft is None and not config.draft:
        return target
    if new_draft is None:
        source = ModelSource.of(config, "draft")
        if not is_feature_draft(source.location, source.revision):
            return weightless_model(source)
        new_draft = NewFeatureDraft("eagle3")  # of about that size
    with torch.device("meta"):
        return new_draft.make(target)


def _prompts(cfg: DictConfig, config: PairConfig) -> tuple[Mapping[str, int], float]:
    """Return the numbers of prompts by split, and their mean length in tokens; of a data set of the
    hub, which may have to be downloaded, those that are asked for.
    """
    source = source_of(cfg)
    if isinstance(source, DatasetSource) and not Path(source.path).expanduser().exists():
        asked = {split: cfg.data[f"num_{split}"] for split in ("train", "dev", "test")}
        return asked, _PROMPT_TOKENS
    tokenizer = tokenizer_of(config)
    chats = config.chat if config.chat is not None else tokenizer.chat_template is not None
    found = unique(source.load(chats))
    counts = dict[str, int]()
    for prompt in found:
        counts[prompt.split] = counts.get(prompt.split, 0) + 1
    return counts, _mean_length(found[:_SAMPLE], tokenizer)


def _mean_length(prompts: Sequence[Prompt], tokenizer: Callable) -> float:
    lengths = [len(tokenizer(prompt.text)["input_ids"]) for prompt in prompts]
    return sum(lengths) / len(lengths) if lengths else _PROMPT_TOKENS


def _of_data(context: _Context, cfg: DictConfig) -> list[Stage]:
    wanted = settings_of(OwnPrompts, cfg).number
    if wanted:
        return [context.responses(wanted, context.data.max_new_tokens, "prompts")]
    return _data(context, labelled=True)


def _data(context: _Context, labelled: bool, *splits: str) -> list[Stage]:
    num = context.of(*(splits or ("train", "dev", "test")))
    answered = context.responses(num, context.data.max_new_tokens)
    if context.data.elsewhere:  # the pace of vLLM or a server is not known here
        answered = replace(answered, name="responses, elsewhere", seconds=0.0, memory=0.0)
    stages = [answered]
    if labelled:
        stages.append(context.labels(num))
    return stages


def _of_train(context: _Context, cfg: DictConfig) -> list[Stage]:
    settings = settings_of(HeadTraining, cfg)
    most = context.data.max_new_tokens
    num = context.of("train", "dev")
    tokens = context.texts(num, most)
    hidden = context.draft.lm.hidden_size
    positions = num * most * (hidden * context.draft.lm.output_embedding.weight.itemsize + 16)
    stages = _data(context, labelled=True)
    for part in settings.kinds():
        disk = part.num_mixes * positions
        is_stored = disk <= part.features_budget * _GIB
        reads = part.num_mixes if is_stored else part.trainer.max_epochs
        weights = 0.0
        for spec in part.specs():
            weights += _num_weights(spec.config, hidden)
        trained = 6 * num * most * part.trainer.max_epochs * weights / context.rates.flops
        seconds = context.draft_seconds(tokens * reads) + trained
        stages.append(
            Stage(
                f"training, {part.heads}",
                num,
                tokens * part.trainer.max_epochs,
                seconds,
                context.reading_memory(),
                disk if is_stored else 0.0,
            )
        )
    if settings.calibration is not None:
        num = min(settings.calibration, context.of("dev"))
        stages += context.recording(num, most, 4)
    return stages


def _num_weights(config: HeadConfig, hidden: int) -> float:
    """Return about how many weights a head has, for a draft of this width; `config` is without a
    pair.
    """
    wide = config.width != 1
    width = config.width if wide else hidden if config.predicts == "input_token" else hidden / 8
    return (width or hidden) * (2 * hidden + config.depth * (width or hidden))


def _of_distill(context: _Context, cfg: DictConfig) -> list[Stage]:
    settings = settings_of(Distillation, cfg)
    most = context.data.max_new_tokens
    splits = ("train", "dev", "test") if settings.samples == "target" else ("dev", "test")
    stages = _data(context, False, *splits)
    num = context.of("train")
    tokens = context.texts(num, most)
    epochs = settings.trainer.max_epochs
    draft = context.draft.lm.model
    is_unrolled = context.reads_target
    if is_unrolled:
        stored = tokens * state_bytes(context.target.lm, len(context.draft.lm.reads_layers))
    else:
        stored = num * most * (6 * min(NUM_KEPT, context.target.lm.vocab_size) + 2)
    is_stored = stored <= settings.target_probs_budget * _GIB
    seconds = context.target.read_seconds(tokens * (1 if is_stored else epochs))
    num_steps = settings.num_steps if is_unrolled else 1
    seconds += 3 * num_steps * context.draft.read_seconds(tokens * epochs)
    weights = TrainedWeights.of(draft, settings)
    stages.append(
        Stage(
            "distilling",
            num,
            tokens * epochs,
            seconds,
            weights.num_bytes + num_steps * context.draft.memory(),
            (stored if is_stored else 0.0) + weights.written_bytes(2),
        )
    )
    return stages


def _of_evaluate(context: _Context, cfg: DictConfig) -> list[Stage]:
    values = dict.fromkeys(("stopping", "drafting", "verification"))
    settings = settings_of(EvaluationKeys, cfg, **values)
    most = settings.max_new_tokens
    num = settings.num_prompts + settings.num_dev_prompts
    stages = context.recording(num, most, settings.record.num_samples)
    stages.append(Stage("timing steps", 0, 0, settings.timing_seconds))
    if settings.live != "none":
        num = settings.num_live_prompts * settings.repeats
        stages.append(_decoding(context, num, most, _DECODINGS))
    return stages


def _of_probe(context: _Context, cfg: DictConfig) -> list[Stage]:
    settings = settings_of(Probe, cfg)
    most = settings.max_new_tokens
    stages = context.recording(settings.num_prompts, most, 4)
    stages.append(Stage("timing steps", 0, 0, settings.timing_seconds))
    stages.append(_decoding(context, 4, most, 2))
    return stages


def _decoding(context: _Context, num: int, max_new_tokens: int, times: int) -> Stage:
    """Return the stage in which prompts are decoded one by one, at most as slowly as the target
    alone does.
    """
    tokens = float(num * max_new_tokens * times)
    target = context.target
    seconds = (
        target.num_bytes / target.rates.bandwidth if context.is_cpu else target.pass_seconds(1)
    )
    return Stage("decoding", num, tokens, tokens * seconds)


_STAGES: Mapping[str, Callable[[_Context, DictConfig], list[Stage]]] = {
    "data": _of_data,
    "train": _of_train,
    "distill": _of_distill,
    "evaluate": _of_evaluate,
    "probe": _of_probe,
}


def _count(number: float) -> str:
    """Return a number of tokens with three digits."""
    if number >= 1e6:
        return amount(number, "G", "M")
    return f"{number:,.0f}"
