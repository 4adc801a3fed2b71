"""Responses of the target by vLLM, in a process that ends before the pair labels them, so that its
memory is free by then.

Requests have seeds, so a response does not depend on the others, up to the rounding of sums.
"""

import logging
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TypedDict

from specheads.data_gen.settings import DataGeneration
from specheads.data_gen.shard_rows import Shard, uniforms_of, warp_of
from specheads.decoding.responses import Response
from specheads.errors import UserError
from specheads.integrations.vllm_responses import lines_of
from specheads.pair.pair import Pair
from specheads.pair.revisions import commit_of, resolve
from specheads.pair.sampling import Warp
from specheads.pair.synthetic import is_synthetic

logger = logging.getLogger(__name__)

SEEDS = 2**53  # as many as there are numbers of which a uniform one is drawn
_FIND_VERSION = (
    "import importlib.metadata as m; names = m.packages_distributions().get('vllm');"
    " print(m.version(names[0]) if names else '')"
)


class SamplingArguments(TypedDict, total=False):
    """Arguments of vLLM's SamplingParams, which other servers take by the same names."""

    temperature: float
    stop_token_ids: list[int]
    top_k: int
    top_p: float
    min_p: float
    logit_bias: dict[str, float]
    max_tokens: int
    seed: int


class Request(TypedDict):
    """A prompt, and how it is answered."""

    ids: list[int]
    params: SamplingArguments


@cache  # it is asked for every cache that might be used
def _vllm_version(python: str) -> str:
    try:
        done = subprocess.run(
            [python, "-c", _FIND_VERSION], check=False, capture_output=True, text=True
        )
    except OSError as error:
        raise UserError(
            f"vllm.python={python} cannot be run ({error.strerror}); give the path of a Python"
            " interpreter."
        ) from None
    if not (version := done.stdout.strip()):
        raise UserError(
            f"runner=vllm, but {python} has no vLLM; run pip install 'specheads[vllm]', or name an"
            " interpreter that has it: vllm.python=<environment>/bin/python"
        )
    return version


def responses_provenance(settings: DataGeneration) -> dict[str, object]:
    """Return what decides responses besides the target and the settings of all runners.

    Nothing for those that are made here.
    """
    if settings.runner == "server":
        return {"runner": ["server", settings.server_model]}
    if not settings.by_vllm:
        return {}
    return {
        "runner": [
            "vllm",
            _vllm_version(settings.vllm_python or sys.executable),
            dict(settings.vllm_options),
        ]
    }


def vllm_responses(
    pair: Pair,
    shards: Mapping[str, Shard],
    settings: DataGeneration,
    folder: Path,
    advance: Callable[[int], object],
) -> Generator[tuple[str, list[Response]]]:
    """Yield the names of some shards with their responses, which vLLM makes all at once and in this
    order.

    Its process ends with the iterator; the pair may be without the target's weights. Raises
    UserError where vLLM cannot do it.
    """
    if is_synthetic(pair.target_id):
        raise UserError(
            f"runner=vllm cannot load {pair.target_id}, which is made in memory; leave runner out."
        )
    requests = list[Request]()
    for shard in shards.values():
        for prompt, ids in shard.prompts:
            most = min(settings.max_new_tokens, pair.window - len(ids))
            uniform = float(uniforms_of(settings, prompt.prompt_id, shard.sample)[0, 0])
            params = sampling_params(pair, warp_of(settings, shard), most, uniform)
            requests.append({"ids": list(ids), "params": params})
    # the key is the number of the request
    path = folder / "vllm.log"
    ended = dict[int, Response]()
    logger.info("responses: vLLM starts with %d prompts; it logs to %s", len(requests), path)
    content = {"model": model_of(pair, requests, settings), "requests": requests}
    with closing(lines_of(settings.vllm_python or sys.executable, content, path)) as lines:
        first = 0
        for name, shard in shards.items():
            wanted = range(first, first := first + len(shard.prompts))
            while not all(number in ended for number in wanted):
                line = next(lines)
                ended[line["request"]] = Response(line["ids"], line["finished"])
                advance(1)
            yield name, [ended.pop(number) for number in wanted]


def sampling_params(
    pair: Pair, warp: Warp, most: int, uniform: float, seeds: int = SEEDS
) -> SamplingArguments:
    """Return the arguments of vLLM's SamplingParams for a response of at most `most` tokens.

    `uniform` decides the seed.
    """
    chosen: SamplingArguments = {
        "temperature": float(warp.temperature),
        "stop_token_ids": sorted(pair.stop_tokens),
    }
    if warp.min_p and warp.top_p < 1 and not warp.greedy:
        raise UserError(
            f"vLLM cuts by min_p={warp.min_p} before top_p={warp.top_p}, which leaves other tokens"
            " than here; give warp.min_p=0, warp.top_p=1, or runner=local."
        )
    if not warp.greedy:
        chosen["top_k"] = warp.top_k
        chosen["top_p"] = float(warp.top_p)
        if warp.min_p:
            chosen["min_p"] = float(warp.min_p)
    if padded := range(pair.vocab_size, pair.target.config.get_text_config().vocab_size):
        # Tokens that the tokenizer does not know
        chosen["logit_bias"] = dict.fromkeys(map(str, padded), -100.0)
    chosen["max_tokens"] = most
    chosen["seed"] = int(uniform * seeds)
    return chosen


def model_of(
    pair: Pair, requests: Sequence[Request], settings: DataGeneration
) -> dict[str, object]:
    """Return the arguments of vllm.LLM with which a pair's target answers requests."""
    location = resolve(pair.target_id)
    lengths = [len(request["ids"]) + request["params"]["max_tokens"] for request in requests]
    model: dict[str, object] = {
        "model": location,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model's folder may recommend something else
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "max_model_len": max(lengths),
        "disable_log_stats": True,
    }
    if not Path(location).is_dir():
        model["revision"] = commit_of(pair.target.config)
    return model | dict(settings.vllm_options)
