"""The stages of a run by arithmetic: the target's responses, labels, heads, a distilled draft, recordings and decoding.

A decoding step reads the weights once, and the keys and values of every text; it takes the longer of reading weights and
computing (roofline, Williams et al. 2009). Passes over known texts compute. Who works follows from the code: vLLM shares layers
between the GPUs of a node and passes states from node to node; a target that `model.device_map=auto` spreads has one GPU busy at
a time.
"""

from dataclasses import dataclass, replace

import torch

from specheads.errors import UserError
from specheads.heads.config import HeadConfig
from specheads.heads.head import AcceptanceHead
from specheads.plan.machine import Machine
from specheads.plan.models import PlannedModel, PlannedPair
from specheads.plan.settings import PlanSettings
from specheads.replay.recording import BYTES_PER_NODE
from specheads.replay.response_tree import RecordSettings
from specheads.storage.tensor_shards import GIB
from specheads.training.distill.memory import Batch, Forecast, Plan

BANDWIDTH, COMPUTE, DISK = "memory bandwidth", "compute", "disk"
LABEL_BATCH = 16_384  # tokens that both models read together, of data_gen/labels.py
TRAIN, READ_BY_TRAINING = 40 / 52, 50 / 52  # shares of train prompts, and of train and dev prompts: alpaca's
TARGET_TOP_K = 64  # stored tokens of each of the target's distributions
HEAD_BATCH, DISTILL_BATCH = 32, 16


@dataclass(frozen=True)
class Stage:
    """A stage: its tokens, forward passes and seconds by resource, what it stores, and the GPUs that it holds.

    Args:
        seconds_of: by resource; reading memory and computing are done one after the other, the disk at the same time.
        gpus: that it holds, of which `busy` work at a time.
        memory_bytes: on each GPU, at the peak.
    """

    name: str
    tokens: float
    passes: float
    seconds_of: dict[str, float]
    stored_bytes: float
    memory_bytes: float
    gpus: int
    busy: int
    command: str

    def slowed(self, factor: float) -> "Stage":
        """Return the stage with reading and computing that take so many times as long."""
        return replace(
            self, seconds_of={name: value * (1 if name == DISK else factor) for name, value in self.seconds_of.items()}
        )

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return max(self.seconds_of[BANDWIDTH] + self.seconds_of[COMPUTE], self.seconds_of[DISK])

    @property
    def gpu_hours(self) -> float:
        """The hours for which it holds GPUs."""
        return self.gpus * self.seconds / 3600

    @property
    def bound(self) -> str:
        """The resource that takes most of the time."""
        return max(self.seconds_of, key=lambda name: self.seconds_of[name])


@dataclass(frozen=True)
class StepCost:
    """The seconds of decoding steps, by the resource that takes them."""

    reading: float
    computing: float


def decode_cost(model: PlannedModel, machine: Machine, together: int, rows: float, context: float) -> StepCost:
    """Return the seconds of a step of `rows` texts of `context` tokens, on `together` GPUs that share each layer."""
    shared = machine.accelerator.together(together)
    weights = shared.read_seconds(model.size.weight_bytes)
    computing = shared.compute_seconds(model.size.operations(rows))
    cached = rows * context * model.size.position_seconds(shared)
    return StepCost(weights + cached, 0.0) if weights >= computing else StepCost(cached, computing)


def plan(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> list[Stage]:
    """Return all stages.

    Raises:
        UserError: models that do not fit the machine.
    """
    machine.check_fits(f"pair {pair.name}", pair.weight_bytes + _reading(pair))
    stages = [responses(pair, machine, settings), labels(pair, machine, settings), heads(pair, machine, settings)]
    distilled = [distillation(pair, machine, settings)] if settings.distill else []
    evaluated = [recording(pair, machine, settings), predictions(pair, machine, settings), decoding(pair, machine, settings)]
    return [stage.slowed(machine.overheads.get(stage.name, 1.0)) for stage in [*stages, *distilled, *evaluated]]


def _reading(pair: PlannedPair) -> float:
    """Return the bytes that reading a batch of texts takes, of the larger model."""
    return max(pair.target.sizes.reading_bytes(2), pair.draft.sizes.reading_bytes(2))


def _pair_words(settings: PlanSettings) -> list[str]:
    """Return the keys of the pair and of the number of prompts, which every command needs."""
    changed = {"model.draft": settings.draft, "model.target": settings.target, "model.quantization": settings.quantization}
    given = [f"model={settings.model}", *(f"{key}={value}" for key, value in changed.items() if value)]
    counts = [round(settings.prompts * share) for share in (TRAIN, READ_BY_TRAINING - TRAIN)]
    splits = zip(("train", "dev", "test"), [*counts, settings.prompts - sum(counts)], strict=True)
    return [*given, *(f"data.num_{split}={count}" for split, count in splits), f"data.max_new_tokens={settings.max_new_tokens}"]


def _data_words(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> list[str]:
    """Return the keys that decide the data set, by which training finds it again."""
    rows = held_rows(pair, machine, settings)
    chosen = [*_pair_words(settings), f"generation.samples_per_position={settings.samples}"]
    if settings.answered_by == "local":
        return [*chosen, f"generation.batch_size={rows}"]
    nodes = machine.count // machine.connected
    options = f"tensor_parallel_size: {machine.connected}, pipeline_parallel_size: {nodes}, max_num_seqs: {rows}"
    return [*chosen, "runner=vllm", f"'vllm.options={{{options}}}'"]


def held_rows(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> int:
    """Return how many responses are decoded together: those asked for in each group of GPUs, if memory holds their longest."""
    vllm = settings.answered_by == "vllm"
    groups = machine.count // machine.connected if vllm else 1
    weights = pair.target.size.weight_bytes if vllm else pair.weight_bytes
    each = pair.target.size.bytes_per_position * (settings.prompt_tokens + settings.max_new_tokens)
    fitting = int((machine.count * machine.usable - weights) / each)
    return max(min(settings.rows * groups, settings.prompts, fitting), 1)


def responses(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> Stage:
    """Return the stage in which the target answers the prompts."""
    vllm = settings.answered_by == "vllm"
    together, groups = (machine.connected, machine.count // machine.connected) if vllm else (1, 1)
    rows, target = held_rows(pair, machine, settings), pair.target
    cost = decode_cost(target, machine, together, rows / groups, settings.prompt_tokens + settings.response_tokens / 2)
    tokens, steps = settings.prompts * settings.response_tokens, settings.prompts / rows * settings.response_tokens
    busy = machine.accelerator.together(together * groups)
    prompts = busy.compute_seconds(target.size.operations(settings.prompts * settings.prompt_tokens))
    stored = settings.prompts * 4 * (2 * settings.prompt_tokens + settings.response_tokens)  # ids, and about the prompts' text
    seconds = {BANDWIDTH: steps * cost.reading, COMPUTE: steps * cost.computing + prompts, DISK: _disk(stored, settings)}
    weights = target.size.weight_bytes if vllm else pair.weight_bytes
    memory = weights + rows * target.size.bytes_per_position * (settings.prompt_tokens + settings.max_new_tokens)
    held = machine.count if vllm else machine.held(f"answering prompts with {pair.name}", memory)
    command = " ".join(["specheads data", *_data_words(pair, machine, settings)])
    return Stage("responses", tokens, steps, seconds, stored, memory / held, held, held if vllm else 1, command)


def labels(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> Stage:
    """Return the stage in which both models read the responses once, and the draft samples tokens along them."""
    tokens = settings.prompts * settings.text_tokens
    operations = pair.target.size.operations(tokens) + pair.draft.size.operations(tokens)
    # Per response token a drafted one, its acceptance, the overlap and four log-probabilities; two numbers for each more sample.
    stored = settings.prompts * settings.response_tokens * 4 * (7 + 2 * (settings.samples - 1))
    memory = pair.weight_bytes + _reading(pair)
    held = machine.count if settings.answered_by == "vllm" else machine.fewest(memory)  # they are in the command of the responses
    seconds = _computed(machine, 1, operations, stored, settings)
    used = min(held, machine.fewest(memory))
    command = "(the same command)"
    return Stage("labels", tokens, 2 * tokens / LABEL_BATCH, seconds, stored, memory / used, held, 1, command)


def heads(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> Stage:
    """Return the training of heads: the draft reads the texts in each epoch, or once if its states are stored."""
    draft = pair.draft
    tokens = settings.prompts * READ_BY_TRAINING * settings.text_tokens
    labelled = settings.prompts * READ_BY_TRAINING * settings.response_tokens
    # A state in the draft's type, its largest probability and entropy, and the probability of each drafted token.
    states = labelled * (2 * draft.sizes.hidden_size + 4 * (2 + settings.samples))
    stores = settings.features == "cached" or (settings.features == "auto" and states <= settings.features_budget * GIB)
    passes = 1 if stores else settings.epochs
    with torch.device("meta"):
        head = AcceptanceHead(HeadConfig(draft.sizes.hidden_size, overlap=True))
    weights = settings.heads * sum(weight.numel() for weight in head.parameters())
    products = 6 * weights * labelled * settings.epochs  # forward, and two products for the gradients
    stored = states if stores else 0.0
    read = stored * (1 + settings.epochs)  # written once, read in each epoch
    seconds = _computed(machine, 1, draft.size.operations(tokens * passes), read, settings, products)
    memory = pair.weight_bytes + _reading(pair) + 16 * weights  # the target stays for calibration
    held, steps = (
        machine.held(f"training heads for {pair.name}", memory),
        passes * settings.prompts * READ_BY_TRAINING / HEAD_BATCH,
    )
    kept = [f"features=cached features_budget={settings.features_budget:g}"] if stores else ["features=online"]
    words = [*_data_words(pair, machine, settings), *kept, f"trainer.max_epochs={settings.epochs}"]
    command = " ".join(["specheads train", *words])
    return Stage("heads", tokens * passes, steps, seconds, stored, memory / held, held, 1, command)


def distillation(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> Stage:
    """Return the distillation of the draft from stored distributions of the target, over all GPUs.

    Raises:
        UserError: a draft whose training does not fit the machine.
    """
    draft, length = pair.draft, settings.prompt_tokens + settings.max_new_tokens
    texts = settings.prompts * TRAIN
    tokens = texts * settings.text_tokens
    operations = 3 * draft.size.operations(tokens * settings.epochs) + pair.target.size.operations(tokens)
    stored = texts * settings.response_tokens * (6 * TARGET_TOP_K + 2)
    training = Forecast(draft.sizes, Batch(DISTILL_BATCH, int(length)), "bf16-mixed", "cuda").training(Plan(True, True))
    shared = training.state + training.copies
    alone = training.total <= machine.usable
    memory = training.total if alone else training.total - shared * (1 - 1 / machine.count)
    if memory > machine.usable:
        raise UserError(
            f"training the draft of {pair.name} needs {memory / 1e9:.3g} GB on each GPU, but gpu={machine.name} holds "
            f"{machine.usable / 1e9:.3g} GB; use more GPUs (gpus=), or distil a smaller draft (draft=)."
        )
    spread = [f"trainer.devices={machine.count}", f"+trainer.strategy={'ddp' if alone else 'fsdp2'}"]
    spread.append(f"loader.batch_size={DISTILL_BATCH * machine.count}")  # of all GPUs together
    words = [
        *_data_words(pair, machine, settings),
        f"trainer.max_epochs={settings.epochs}",
        "target_probs.keep=cached",
        *(spread if machine.count > 1 else ()),
    ]
    words += [f"target_probs.budget={stored / GIB + 1:.0f}"]
    seconds = _computed(machine, machine.count, operations, stored * (1 + settings.epochs), settings)
    passes = settings.epochs * texts / DISTILL_BATCH
    command = " ".join(["specheads distill", *words])
    return Stage("distilling", tokens * settings.epochs, passes, seconds, stored, memory, machine.count, machine.count, command)


def recorded_tokens(settings: PlanSettings) -> tuple[float, float]:
    """Return the tokens of responses in a recording, and those in drafts that branch off."""
    record, emitted = RecordSettings(), settings.eval_prompts * settings.response_tokens
    return emitted, emitted * record.num_samples * (1 - settings.acceptance) * record.max_tokens


def recording(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> Stage:
    """Return the recording of prompts: responses, a pass of both models, and drafts that branch off where a token is rejected."""
    record, draft = RecordSettings(), pair.draft
    tokens = settings.eval_prompts * settings.text_tokens
    emitted, nodes = recorded_tokens(settings)
    context = settings.text_tokens / 2
    weights = pair.weight_bytes + _reading(pair)
    each = (settings.prompt_tokens + settings.max_new_tokens + record.max_tokens) * draft.size.bytes_per_position
    together = min(record.batch_size, max(int((machine.count * machine.usable - weights) / each), 1))  # branches
    rows = min(settings.eval_prompts, together)
    answer = decode_cost(pair.target, machine, 1, rows, context)
    branch = decode_cost(draft, machine, 1, together, context)
    answers, branches = emitted / rows, nodes / together
    read = pair.target.size.operations(tokens) + draft.size.operations(tokens)
    stored = (emitted + nodes) * BYTES_PER_NODE
    seconds = {
        BANDWIDTH: answers * answer.reading + branches * branch.reading,
        COMPUTE: answers * answer.computing + branches * branch.computing + machine.accelerator.compute_seconds(read),
        DISK: _disk(stored, settings),
    }
    memory = weights + together * each
    held, tests = machine.held(f"recording prompts of {pair.name}", memory), settings.eval_prompts - settings.eval_prompts // 2
    numbers = [f"num_prompts={tests}", f"num_dev_prompts={settings.eval_prompts // 2}"]
    words = [
        *_pair_words(settings),
        "head=latest",
        *numbers,
        f"record.batch_size={together}",
        f"num_live_prompts={settings.live_prompts}",
    ]
    command = " ".join(["specheads evaluate", *words])
    return Stage("recording", emitted + nodes, answers + branches, seconds, stored, memory / held, held, 1, command)


def predictions(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> Stage:
    """Return the passes over all recorded tokens: the draft's for heads, the target's for the true acceptance probabilities."""
    nodes, prompts = sum(recorded_tokens(settings)), settings.eval_prompts * settings.prompt_tokens
    operations = pair.target.size.operations(nodes + prompts) + pair.draft.size.operations(nodes + prompts)
    stored = 4 * 3 * nodes  # a head's two predictions, and the true probability
    memory = pair.weight_bytes + _reading(pair)
    seconds, held = _computed(machine, 1, operations, stored, settings), machine.fewest(memory)
    passes = 2 * nodes / RecordSettings().batch_size
    return Stage("predictions", nodes, passes, seconds, stored, memory / held, held, 1, "(the same command)")


def decoding(pair: PlannedPair, machine: Machine, settings: PlanSettings) -> Stage:
    """Return the decoding of live prompts, at most as slow as by the target alone, token by token."""
    tokens = settings.live_prompts * settings.decodings * settings.response_tokens
    cost = decode_cost(pair.target, machine, 1, 1, settings.prompt_tokens + settings.response_tokens / 2)
    seconds = {BANDWIDTH: tokens * cost.reading, COMPUTE: tokens * cost.computing, DISK: 0.0}
    memory = pair.weight_bytes + _reading(pair)
    held = machine.fewest(memory)
    return Stage("decoding", tokens, tokens, seconds, 0.0, memory / held, held, 1, "(the same command)")


def _disk(num_bytes: float, settings: PlanSettings) -> float:
    return num_bytes / (settings.disk * 1e9)


def _computed(
    machine: Machine, busy: int, operations: float, num_bytes: float, settings: PlanSettings, float32: float = 0
) -> dict[str, float]:
    """Return the seconds of passes over known texts, next to the disk's for bytes that are written or read."""
    computing = machine.accelerator.together(busy).compute_seconds(operations, float32)
    return {BANDWIDTH: 0.0, COMPUTE: computing, DISK: _disk(num_bytes, settings)}
