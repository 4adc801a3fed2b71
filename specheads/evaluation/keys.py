"""The keys of an evaluation: all that can be checked without the classes of strategies, which
import torch.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, SkipValidation, model_validator

from specheads.decoding.keys import DecoderKeys
from specheads.errors import UserError, is_number
from specheads.settings import (
    Flag,
    PositiveCount,
    PositiveNumber,
    Seed,
    Settings,
    Text,
    number,
    setting,
)

FIXED = "fixed_length"
MEASURED = "measured"  # the ratio of costs on this machine


class Kind(StrEnum):
    """What a setting is, for a reader who chooses."""

    ALONE = "target alone"
    FIXED = "best fixed length"
    HEADLESS = "best without training"
    HEAD = "head"


def _threshold(value: object) -> object:
    if value != "auto" and not (is_number(value) and 0 <= value <= 1):
        raise ValueError("must be a number from 0 to 1, or auto")
    return value


Threshold = Annotated[object, AfterValidator(_threshold)]  # a number, or auto
Ratio = Annotated[float, number("a finite number above 1", lambda value: value > 1)]


class RecordingSettings(Settings):
    """How much of each response is recorded."""

    num_samples: PositiveCount = setting(
        4, "acceptance samples of each response; more make smaller errors"
    )
    ground_truth: Flag = setting(
        True, "let the target score rejected branches too, for the informed ceiling"
    )


class EvaluationKeys(DecoderKeys):
    """The keys of `specheads evaluate`, with strategies unchecked."""

    seed: Seed = setting(0, "seed of everything that is sampled")
    stopping: object = setting(
        None,
        "the stopping rules, by name; null: fixed lengths and head thresholds, with the values of"
        " the two keys below",
    )
    fixed_lengths: tuple[PositiveCount, ...] = setting(
        (1, 2, 3, 4, 5, 6, 8, 10, 12, 14), "fixed draft lengths to try, in tokens"
    )
    thresholds: tuple[Threshold, ...] = setting(
        ("auto", 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        "thresholds to try for a head: a draft stops once the predicted probability that some"
        " drafted token is rejected exceeds the threshold, 0 to 1; auto: the threshold at which one"
        " more draft step is worth its cost",
    )
    split: Literal["test", "final"] = setting(
        "test",
        "which prompts are reported: test, or final (of data.final_part or data.num_final), to be"
        " read once",
    )
    num_prompts: PositiveCount = setting(100, "prompts of that split to record")
    num_dev_prompts: PositiveCount = setting(100, "dev prompts to record, on which rules are tuned")
    # Each is a TestSet
    test_sets: SkipValidation[Mapping[str, object]] | None = setting(
        None,
        "more prompts to report on, {name: file}, by a name of conf/data; null for a file: the test"
        " prompts of its split. Prompts that a head learned from are left out of these and of"
        " all others",
    )
    record: RecordingSettings = setting(
        RecordingSettings(), "how much of each response is recorded"
    )
    ratios: tuple[Ratio, ...] = setting(
        (5, 10, 20),
        "predict speed-ups also for targets whose forward pass costs this many draft steps, for"
        " example 10",
    )
    max_new_tokens: PositiveCount = setting(
        512, "longest response, in tokens", config="${data.max_new_tokens}"
    )
    head: Text | None = setting(
        "latest",
        "a folder of a head or of several, a hub id, latest (those of the newest training for this"
        " pair in paths.outputs), or null for rules without a head",
    )
    any_draft: Flag = setting(
        False,
        "true: accept heads that were trained for another draft, or for another state of it, too",
    )
    calibrate: Flag = setting(
        False,
        "true: fit the heads' calibration to the dev prompts first, and write it into their folders"
        " unless theirs is as good; it is for prompts unlike those that a head was trained for",
    )
    live: Literal["winners", "none"] = setting(
        "winners", "what is decoded: winners (the best rules on dev prompts), or none"
    )
    live_rules: tuple[Text, ...] = setting(
        (FIXED, "head_threshold"),
        "rules that are decoded where drafts or verification cannot be replayed",
    )
    num_live_prompts: PositiveCount = setting(32, "prompts of the split to decode")
    repeats: PositiveCount = setting(
        1, "times that each prompt is decoded, each time with another seed"
    )
    timing_seconds: PositiveNumber = setting(
        10.0, "time steps until they are known to 1 %, for at most so many seconds"
    )
    concurrency: tuple[PositiveCount, ...] = setting(
        (),
        "how many prompts are decoded at once, each number for a table by itself, for example"
        " [1,4,16,64]: by the target alone, the best fixed length for that size, and the best rules"
        " of the live evaluation",
    )
    verbose: Flag = setting(False, "true: print every table of the report, too")

    @model_validator(mode="after")
    def _something_is_timed(self) -> Self:
        if self.live == "none" and not self.ratios:
            raise UserError(
                "live=none with ratios=[] leaves no costs to predict speeds with; give some, for"
                " example ratios=[5,10,20]."
            )
        return self
