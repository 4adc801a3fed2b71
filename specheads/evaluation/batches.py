"""The batches of an evaluation: the reported prompts, decoded in so many rows at once as `concurrency` names."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from specheads.decoding.batch.step_costs import kept_costs
from specheads.decoding.decoder import SpeculativeDecoder
from specheads.decoding.load.costs import LoadCosts
from specheads.evaluation.candidate import FIXED, rule_fields
from specheads.evaluation.decode import best_of_kinds, open_journal, window_of
from specheads.evaluation.outcome import Outcome
from specheads.evaluation.policies import DEFAULT
from specheads.evaluation.prompt_sets import PromptSet
from specheads.evaluation.report import BatchTable
from specheads.evaluation.serving.batch_rows import batch_rows
from specheads.evaluation.serving.batch_settings import Predictions, best_fixed, by_load, longest_draft, predictions
from specheads.evaluation.serving.batch_sweep import ALONE, BatchSetting, BatchSweep, num_requests
from specheads.evaluation.settings import Evaluation
from specheads.evaluation.setup import Setup
from specheads.forecast import progress
from specheads.storage.runs import is_resumed

logger = logging.getLogger(__name__)


def decode_batches(setup: Setup[Evaluation], outcome: Outcome) -> list[BatchTable]:
    """Return a table for every number of rows.

    Each has the target alone, the best fixed length for this size, the best rules with and without a head, and the policies that
    know the load. Fixed lengths and policies are chosen and fitted on dev prompts at the measured costs of steps in rows.
    """
    evaluation = setup.settings
    prompts = setup.prompts.decoded(evaluation.num_live_prompts)
    sizes = list(dict.fromkeys(evaluation.concurrency))
    lengths = [candidate.rule.max_tokens for candidate in outcome.candidates if candidate.family == FIXED]
    counts = {size: num_requests(len(prompts.prompts), size) for size in sizes}
    for size, count in counts.items():
        logger.info("batches of %d: %d requests, %s", size, count, _repeated(count, len(prompts.prompts)))
    assert outcome.choices is not None  # rules were replayed
    rules = [rule for rule in best_of_kinds(outcome.choices) if rule.family != FIXED]
    preferred = [rule.head for rule in rules if rule.head is not None]
    heads = {name: setup.heads[name] for name in dict.fromkeys([*preferred, *setup.heads])}
    dev = outcome.recorded[0].recording
    policies = evaluation.policies or DEFAULT
    predicted = predictions(dev, heads, longest_draft(policies))
    costs = _costs(setup, predicted, max(sizes), max(*lengths, longest_draft(policies)))
    settings = {}
    for size in sizes:
        plain = [
            best_fixed(dev, costs, lengths, size),
            *(BatchSetting(rule.name, rule.family, rule.live, **rule_fields(rule)) for rule in rules),
        ]
        settings[size] = [ALONE, *plain, *by_load(policies, plain, predicted, costs)]
    total = evaluation.repeats * sum(len(settings[size]) * count for size, count in counts.items())
    logger.info("batches: %d responses of at most %d tokens, into %s", total, evaluation.max_new_tokens, setup.run_folder)
    with progress("decoding batches", total) as advance:
        return [_table(setup, settings[size], prompts, size, costs, advance) for size in sizes]


def _repeated(count: int, num_prompts: int) -> str:
    """Return how prompts become requests."""
    if count == num_prompts:
        return "each prompt once"
    return f"because {num_prompts} prompts are too few for them: they are repeated, each time with another seed"


def _costs(setup: Setup[Evaluation], predicted: Predictions, max_batch: int, max_tokens: int) -> LoadCosts:
    """Return what rounds cost here, as this run first took it: a resumed run must not choose other settings."""
    path, settings = setup.run_folder / "batch-costs.json", setup.settings
    if not (is_resumed(setup.run_folder) and path.is_file()):
        decoder = SpeculativeDecoder(
            setup.pair,
            verification=settings.verification,
            warp=settings.warp,
            engine=settings.engine,
            window=window_of(setup),
        )
        kept_costs(decoder, max_batch, max_tokens, predicted.read_out, predicted.head).write(path)
    return LoadCosts.read(path)


def _table(
    setup: Setup[Evaluation],
    settings: Sequence[BatchSetting],
    prompts: PromptSet,
    size: int,
    costs: LoadCosts,
    advance: Callable[[int], Any],
) -> BatchTable:
    evaluation = setup.settings
    policies = [setting.policy and setting.policy.max_tokens for setting in settings]
    decided = {"settings": [setting.name for setting in settings], "longest": policies, "rows": size, "costs": asdict(costs)}
    journal = open_journal(setup, f"batches-{size}", decided, prompts.prompts)
    sweep = BatchSweep(
        setup.pair,
        evaluation.warp,
        evaluation.max_new_tokens,
        size,
        evaluation.repeats,
        evaluation.seed,
        evaluation.engine,
        window=window_of(setup),
        meter=setup.metering.meter,
    )
    runs = sweep.run(settings, [ids for _, ids in prompts.prompts], journal, advance)
    count = num_requests(len(prompts.prompts), size)
    return BatchTable(size, count, batch_rows(settings, runs, prompts.groups, setup.metering.idle))
