"""How good are a head's two read-outs, what does the second one cost, and how is the product of a draft's chances calibrated?

    python benchmarks/read_outs.py [--head latest] [--prompts 200] [--tokens 8] [--repeats 300]

The head is the default one of train.py, on nano. Calibrations are fitted on recorded dev prompts and measured on test prompts.
The product up to token k is the chance that a draft's first k tokens are all accepted, which decides how many tokens of each
request are worth verifying; bins of its calibration error hold equally many drafts.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from torch.nn.functional import logsigmoid

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Column, Table, Value, add_result_option, prompt_record, text_of, write_result
from specheads import AcceptanceHead, Warp, load_head, load_pair
from specheads.commands.data import data_cache
from specheads.evaluation.intervals import interval, resample_counts
from specheads.evaluation.recordings import Recorder
from specheads.heads.calibration import IndexCalibration
from specheads.heads.checkpoint import latest_head
from specheads.heads.cost import counted_share
from specheads.heads.metrics import equal_mass_error
from specheads.pair import Pair
from specheads.pair_config import config_folder
from specheads.prompts.encoding import encode_prompts
from specheads.prompts.generated_data import GeneratedData
from specheads.replay.drafts import DraftLogits, draft_logits
from specheads.replay.recording import Recording
from specheads.replay.replay import head_logits, recorded_head, recorded_overlap
from specheads.replay.response_tree import RecordSettings

READ_OUTS = {"acceptance of a sampled token": recorded_head, "expected acceptance before sampling": recorded_overlap}
BY_INDEX = "slope and intercept by index"
NUM_DEV = 100  # as train.py calibrates
NUM_BINS = 15
TEMPERATURES = [2 ** (step / 16) for step in range(-32, 33)]  # 0.25 to 4, neighbours differ by 4 %


def recordings(pair: Pair, data: GeneratedData, head: AcceptanceHead, num_test: int) -> dict[str, Recording]:
    """Return the recordings of dev and test prompts with the head's predictions."""
    sets = {
        split: encode_prompts(pair, [prompt for prompt in data.prompts if prompt.split == split], data.limits)[:count]
        for split, count in (("dev", NUM_DEV), ("test", num_test))
    }
    recorder = Recorder(pair, Warp(top_k=50), data.limits, RecordSettings(), 0, data.folder.parent)
    return recorder.record(sets, [head], ground_truth=False)


def sequential_temperatures(drafts: DraftLogits) -> IndexCalibration:
    """Return temperatures, slopes without intercepts, that calibrate the chance that a draft survives up to each token.

    For one index after the other, the temperature is the one of TEMPERATURES with the least calibration error of the product of
    all chances up to this index, in which the earlier temperatures stay as they are.

    Source: sequential temperature scaling (DSpark).
    """
    slopes: list[float] = []
    product = torch.zeros(len(drafts.logits), dtype=torch.float64)  # its logarithm
    for logit, survived, known in zip(drafts.logits.double().T, drafts.survived.T, drafts.known.T, strict=True):
        if not known.any():
            break
        logarithms = [product + logsigmoid(logit / temperature) for temperature in TEMPERATURES]
        errors = [equal_mass_error(each[known].exp(), survived[known].double(), NUM_BINS) for each in logarithms]
        best = min(range(len(errors)), key=errors.__getitem__)
        slopes.append(1 / TEMPERATURES[best])
        product = logarithms[best]
    return IndexCalibration(slopes, [0.0] * len(slopes)) if slopes else IndexCalibration.neutral()


def log_chances(fitted: IndexCalibration, drafts: DraftLogits) -> Tensor:
    """Return the logarithms of the calibrated chances of the tokens of drafts, (drafts, K)."""
    index = torch.arange(drafts.logits.shape[1]).expand_as(drafts.logits)
    return logsigmoid(fitted(drafts.logits.flatten(), index.flatten()).reshape(drafts.logits.shape))


def product_errors(log_products: Tensor, drafts: DraftLogits) -> list[float]:
    """Return the calibration error of products up to each token."""
    columns = zip(log_products.T, drafts.survived.T, drafts.known.T, strict=True)
    return [equal_mass_error(product[known].exp(), survived[known].double(), NUM_BINS) for product, survived, known in columns]


def calibrations(recording: Recording, head: AcceptanceHead, num_tokens: int) -> dict[str, list[IndexCalibration]]:
    """Return the calibrations of both read-outs by the name of their kind."""
    recorded = [read_out(head) for read_out in READ_OUTS.values()]
    acceptance = draft_logits(recording, recorded[0], num_tokens)
    by_index = [IndexCalibration.fit(*head_logits(recording, each)) for each in recorded]
    return {
        "none": [IndexCalibration.neutral()] * 2,
        BY_INDEX: by_index,
        "sequential temperatures": [sequential_temperatures(acceptance), by_index[1]],
    }


def error_samples(log_products: Tensor, drafts: DraftLogits, prompt: Tensor, resamples: np.ndarray) -> np.ndarray:
    """Return the mean over tokens of `product_errors` under each row of `resamples` (R, prompts): (R,), in unchanged bins.

    `prompt` (drafts,) is the number of each draft's prompt.
    """
    samples = []
    for product, survived, known in zip(log_products.T, drafts.survived.T, drafts.known.T, strict=True):
        distance = product[known].exp() - survived[known].double()
        bins = torch.empty(len(distance), dtype=torch.long)
        for number, part in enumerate(product[known].argsort().tensor_split(NUM_BINS)):
            bins[part] = number
        sums = torch.zeros(resamples.shape[1], NUM_BINS, dtype=torch.float64)
        sums.index_put_((prompt[known], bins), distance, accumulate=True)
        sizes = torch.bincount(prompt[known], minlength=resamples.shape[1])
        samples.append(np.abs(resamples @ sums.numpy()).sum(axis=1) / (resamples @ sizes.numpy()))
    return np.mean(samples, axis=0)


def product_rows(
    kinds: Mapping[str, Sequence[IndexCalibration]],
    recording: Recording,
    head: AcceptanceHead,
    count: int,
    resamples: np.ndarray,
) -> list[list[Value]]:
    """Return the errors of products with each kind of calibration: of acceptances, and with the last token not yet sampled.

    After the errors of the first `count` tokens come their mean and what it is above that of BY_INDEX, with intervals.
    """
    acceptance, overlap = (draft_logits(recording, read_out(head), count) for read_out in READ_OUTS.values())
    prompt = torch.repeat_interleave(torch.arange(recording.num_prompts), recording.lengths).repeat(recording.num_samples)
    means: dict[tuple[str, str], np.ndarray] = {}
    errors: dict[tuple[str, str], list[float]] = {}
    for name, fitted in kinds.items():
        chances, expected = (log_chances(each, drafts) for each, drafts in zip(fitted, (acceptance, overlap), strict=True))
        products = {
            "all tokens sampled": chances.cumsum(1),
            "the last one not yet sampled": chances.cumsum(1) - chances + expected,
        }
        for last, logarithms in products.items():
            errors[name, last] = product_errors(logarithms, acceptance)
            means[name, last] = error_samples(logarithms, acceptance, prompt, resamples)
    return [
        [
            name,
            last,
            *each,
            *(asdict(interval(samples)) for samples in (means[name, last], means[name, last] - means[BY_INDEX, last])),
        ]
        for (name, last), each in errors.items()
    ]


def step_rows(head: AcceptanceHead, pair: Pair, repeats: int) -> list[list[Value]]:
    """Return the seconds of a head's eager computation for some numbers of requests, alone and with the second read-out."""
    rows: list[list[Value]] = []
    for batch in (1, 16, 64):
        size = head.config.hidden_size
        features = {"hidden": torch.randn(batch, size), "embedding": torch.randn(batch, size)}
        features |= {name: torch.rand(batch) for name in ("draft_prob", "max_prob", "entropy")}
        calls: list[Callable[[], Tensor]] = [lambda given=features: head(given), lambda given=features: head.overlap_logit(given)]
        taken: list[list[float]] = [[], []]
        for _ in range(repeats):
            for call, seconds in zip(calls, taken, strict=True):
                start = time.perf_counter()
                call()
                seconds.append(time.perf_counter() - start)
        first, second = (statistics.quantiles(seconds, n=4)[0] for seconds in taken)
        rows.append([batch, first, first + second, (first + second) / first, counted_share(head, pair.draft_lm)])
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", default="latest")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=300)
    add_result_option(parser, "read_outs")
    arguments = parser.parse_args()
    with initialize_config_dir(str(config_folder().resolve()), version_base="1.3"):
        cfg = compose("data_gen", ["model=nano"])
    pair = load_pair("nano")
    data = data_cache(cfg, pair)
    head = load_head(latest_head(Path("outputs"), pair) if arguments.head == "latest" else arguments.head)
    recorded = recordings(pair, data, head, arguments.prompts)
    group = {prompt.prompt_id: prompt.group or prompt.prompt_id for prompt in data.prompts}
    groups = [group[prompt_id] for prompt_id in recorded["test"].prompt_ids]
    kinds = calibrations(recorded["dev"], head, arguments.tokens)
    columns = [Column("calibration"), Column("draft"), *(Column(f"k = {k + 1}", "percent:1") for k in range(arguments.tokens))]
    tables = [
        Table(
            "products",
            "Calibration error of the chance that k tokens are accepted, 15 bins of equal mass, test prompts",
            [*columns, Column("mean", "percent:1"), Column("above that by index", "signed_percent:1")],
            product_rows(kinds, recorded["test"], head, arguments.tokens, resample_counts(groups)),
        ),
        Table(
            "step",
            f"A head's eager computation in a draft step; lower quartile of {arguments.repeats}",
            [
                Column("requests"),
                Column("acceptance", "ms:3"),
                Column("both read-outs", "ms:3"),
                Column("both over acceptance", "ratio"),
                Column("acceptance, of a draft step's weights", "percent"),
            ],
            step_rows(head, pair, arguments.repeats),
        ),
    ]
    for table in tables:
        print(f"{table.title}\n\n{text_of(table)}\n")
    prompts = {name: prompt_record(each.prompt_ids) for name, each in recorded.items()}
    write_result(arguments.result, tables, split="test, read before", seeds=[0], prompts=prompts)


if __name__ == "__main__":
    main()
