"""The decoding of an experiment: every prompt by every method in turn, with a journal from which a
killed run resumes.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from specheads.decoding.decoder import Baseline, Decoder, SpeculativeDecoder
from specheads.decoding.engine import compile_ahead
from specheads.decoding.records import DecodeStats
from specheads.decoding.step_times import counted_share
from specheads.errors import UserError
from specheads.evaluation.setup import open_journal
from specheads.evaluation.sweep import response_seed
from specheads.forecast import progress
from specheads.heads.head import LocatedHead
from specheads.heads.metrics import auroc, binary_kl
from specheads.pair.language_model import LanguageModel
from specheads.pair.padding import SLICE_ELEMENTS, slices
from specheads.pair.pair import Pair
from specheads.pair.sampling import nan_message
from specheads.papers.layer_skip import LayerSkip
from specheads.papers.mjsd import BlockSearch
from specheads.papers.reproduction.settings import Method, Reproduction, Tally, priced, tally
from specheads.prompts.prompt import EncodedPrompt, ResponseLimits
from specheads.replay.head_scores import record_sets
from specheads.replay.recording import GROUND_TRUTH, Recorder, Recording
from specheads.replay.replay import Counts, RecordedHead, head_logits, oracle, recorded_head, replay
from specheads.replay.response_tree import RecordSettings
from specheads.storage.journal import Entry

logger = logging.getLogger(__name__)
Heads = Mapping[str, LocatedHead]  # by name
REPLAYED = ("target", "oracle")  # baselines
Meter = Callable[[], float]  # returns joules since an arbitrary moment


def decode(
    pair: Pair, settings: Reproduction, prompts: Sequence[EncodedPrompt], run: Path, heads: Heads
) -> dict[str, Tally]:
    """Decode all prompts with all methods, interleaved prompt by prompt in an order that rotates.

    Return what each did.

    Prompts that the journal of an interrupted run in the folder `run` has are not decoded again.
    """
    methods = [method.keys for method in settings.methods]
    ids = [tokens for _, tokens in prompts]
    journal = open_journal(
        run / "generations.jsonl", pair, settings, prompts, heads, methods=methods
    )
    window = min(pair.window, max(map(len, ids)) + settings.max_new_tokens)
    total = len(settings.methods) * len(prompts)
    meter = energy_meter(pair)
    logger.info(
        "%d methods x %d prompts = %d responses, into %s",
        len(settings.methods),
        len(prompts),
        total,
        run,
    )
    with progress("decoding", total) as advance:
        decoders: dict[str, Decoder] = {}
        if len(journal.entries) < len(prompts):
            decoders = {
                method.name: decoder_of(method, pair, settings, heads, window)
                for method in settings.methods
            }
            compile_ahead(decoder.prepare for decoder in decoders.values())
            for decoder in decoders.values():  # each decodes a prompt that is not counted
                decoder.warm_up()
                decoder.generate(ids[0], settings.max_new_tokens, settings.seed)
        advance(len(journal.entries) * len(settings.methods))
        for number, prompt in enumerate(ids):
            if number not in journal.entries:
                journal.add(number, _decoded(pair, decoders, number, prompt, settings, meter))
                advance(len(decoders))
    entries = [journal.entries[number] for number in range(len(ids))]
    shares = {
        method.name: method.drafting.share(pair)
        for method in settings.methods
        if isinstance(method.drafting, LayerSkip)
    }
    names = [method.name for method in settings.methods]
    return {
        name: tally([entry[name] for entry in entries], settings.ratio, shares.get(name, 0.0))
        for name in names
    }


def replayed(
    pair: Pair, settings: Reproduction, prompts: Sequence[EncodedPrompt], data: Path, heads: Heads
) -> dict[str, Tally]:
    """Return what each method does on recorded responses, with the cost and the predictions of its
    head before calibration.

    Divergence and AUROC are of the true acceptance probabilities. Raises UserError for a method
    that cannot be replayed.
    """
    for method in settings.methods:
        if (
            method.drafting
            or method.verification
            or method.warp
            or (method.stopping is None) != (method.baseline in REPLAYED)
        ):
            raise UserError(
                f"replay=true, but {method.name} is more than a stopping rule, the target or the"
                " oracle alone."
            )
    recorder = Recorder(
        pair,
        settings.warp,
        ResponseLimits(settings.max_new_tokens),
        RecordSettings(),
        settings.seed,
        data,
    )
    (recording,) = record_sets(
        recorder, {"": prompts}, [each.head for each in heads.values()], ground_truth=True
    ).values()
    known = {name: recorded_head(each.head) for name, each in heads.items()}
    of_heads = {
        name: (counted_share(heads[name].head, pair.draft_lm), _quality(recording, head))
        for name, head in known.items()
    }
    walked = iter(
        replay(recording, [_rule(method, known) for method in settings.methods if method.stopping])
    )
    target = recording.lengths.numpy() * recording.num_samples
    tallies = dict[str, Tally]()
    seconds = math.nan * target
    for method in settings.methods:
        if method.baseline == "target":
            counts = Counts(target, 0 * target, 0 * target, target[:, None])
        else:
            counts = (next(walked) if method.stopping else oracle(recording)).per_prompt(
                recording.num_prompts
            )
        spent = (
            counts.drafted,
            counts.accepted,
            counts.discarded,
            counts.target_calls,
            counts.drafted,
        )
        rows = np.stack([counts.tokens, *spent, seconds, seconds], axis=1).tolist()
        entries = [[asdict(DecodeStats(*row)), math.nan, math.nan] for row in rows]
        share, quality = of_heads[_head(method, known)] if method.needs_head else (0.0, {})
        made = tally(entries, settings.ratio)
        tallies[method.name] = priced(
            {**made, **quality, "head_steps": share * counts.drafted}, settings.ratio
        )
    return tallies


def _quality(recording: Recording, head: RecordedHead) -> Tally:
    """Return by prompt (P,) the sums of what the divergence and the AUROC of a recorded head are
    made of.
    """
    logits, _, _, node = head_logits(recording, head)
    truth = recording.features[GROUND_TRUTH][node].double()
    prompt = recording.prompt_of(node)
    rows = []
    for number in range(recording.num_prompts):
        own = prompt == number
        count = int(own.sum())
        accepted = truth[own].sum().item()
        pairs = accepted * (count - accepted)
        ordered = pairs * auroc(logits[own], truth[own]) if pairs else 0.0
        rows.append(
            (count and count * binary_kl(logits[own], truth[own]).item(), count, ordered, pairs)
        )
    return dict(
        zip(
            ("divergence", "num_predicted", "num_in_order", "num_pairs"),
            np.array(rows, dtype=float).T,
            strict=True,
        )
    )


def _head(method: Method, heads: Mapping[str, Any]) -> str:
    return method.head or next(iter(heads))


def _rule(method: Method, heads: Mapping[str, Any]) -> Any:
    assert method.stopping is not None
    given = {"head": heads[_head(method, heads)]} if method.needs_head else {}
    return method.stopping.cls(**method.stopping.arguments, **given)


def decoder_of(
    method: Method, pair: Pair, settings: Reproduction, heads: Heads, window: int
) -> Decoder:
    """Return the decoder of a method, with memory for `window` positions."""
    warp = method.warp or settings.warp
    if method.baseline == "target":
        return Baseline(pair, warp, settings.engine, window)
    if method.baseline == "mjgd":
        return BlockSearch(pair, method.block, method.beams, warp, settings.engine, window)
    if method.baseline == "oracle":
        raise UserError(f"{method.name} knows every outcome, so it cannot decode; use replay=true.")
    rule = (
        _rule(method, {name: each.head for name, each in heads.items()})
        if method.stopping
        else None
    )
    return SpeculativeDecoder(
        pair, method.drafting, rule, method.verification, warp, settings.engine, window
    )


def _decoded(
    pair: Pair,
    decoders: Mapping[str, Decoder],
    number: int,
    prompt: Sequence[int],
    settings: Reproduction,
    meter: Meter | None,
) -> Entry:
    """Return by method, of its response to a prompt: the counts of its rounds, its nats, its
    joules.
    """
    names = list(decoders)
    entry = {}
    first = number % len(names)
    seed = response_seed(settings.seed, number, 0)
    for name in names[first:] + names[:first]:
        before = meter() if meter else None
        out = decoders[name].generate(prompt, settings.max_new_tokens, seed)
        joules = None if meter is None or before is None else meter() - before
        entry[name] = [
            asdict(out.stats),
            response_nats(pair.target_lm, prompt, out.tokens.tolist()),
            joules,
        ]
    return entry


@torch.no_grad()
def response_nats(lm: LanguageModel, prompt: Sequence[int], response: Sequence[int]) -> float:
    """Return the negative log-likelihood of a response to a prompt, in nats.

    Raises UserError where it is NaN.
    """
    tokens = torch.tensor([[*prompt, *response]], device=lm.device)
    states = lm.hidden_states(tokens[:, :-1], use_cache=False)[0, len(prompt) - 1 :]
    expected = tokens[0, len(prompt) :]
    pieces = slices(len(response), lm.vocab_size, SLICE_ELEMENTS)
    nats = sum(
        cross_entropy(lm.logits(states[piece]), expected[piece], reduction="sum").item()
        for piece in pieces
    )
    if math.isnan(nats):
        raise UserError(nan_message(lm.name))
    return nats


def energy_meter(pair: Pair) -> Meter | None:
    """Return the meter of the GPUs that hold a pair, or None, with the reason in the log, where
    there is none.

    NVML's counter is of whole NVIDIA boards, without the host. It moves about ten times a second,
    so that only sums over many responses say something.
    """
    devices = {
        weight.device for lm in (pair.target_lm, pair.draft_lm) for weight in lm.model.parameters()
    }
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    if not gpus or torch.version.hip:
        logger.info("energy is not measured: it is that of NVIDIA's GPUs")
        return None
    try:
        import pynvml
    except ImportError:
        logger.info(
            "energy is not measured: pip install 'specheads[energy]' for nvidia-ml-py, which reads"
            " NVIDIA's counter"
        )
        return None
    try:
        pynvml.nvmlInit()
        # By their ids, because CUDA_VISIBLE_DEVICES changes numbers and order.
        ids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in gpus]
        handles = [pynvml.nvmlDeviceGetHandleByUUID(each) for each in ids]

        def joules() -> float:
            return 1e-3 * sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles))

        joules()
    except pynvml.NVMLError as error:
        logger.info(
            "energy is not measured: %s; NVML counts whole GPUs since Volta, not their parts (MIG)",
            error,
        )
        return None
    return joules
