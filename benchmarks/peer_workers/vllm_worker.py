"""vLLM on a CPU, for `benchmarks/decoding.py`. Runs where vLLM is installed.

It decodes alone, with its draft model, or a head on that; the number of drafted tokens is
fixed when it starts.
"""

import os
import sys
import time
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from processes import Answer, Generate, serve

if TYPE_CHECKING:
    from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

BLOCK = 32  # tokens


def _make(setup: Mapping[str, object]) -> tuple[Mapping[str, str], Generate]:
    """Start vLLM in this process and return its version and what asks it."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one needs Triton
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process between this one and the models
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(setup["threads"]),
    }
    import torch
    import vllm

    torch.set_num_threads(setup["threads"])
    options: dict[str, object] = {
        "model": setup["folder"],
        "dtype": setup["dtype"],
        "max_model_len": setup["window"],
    }
    options |= {"enable_prefix_caching": False, "disable_log_stats": True}
    # No larger KV cache than a request takes, as there are many of these processes.
    options |= {"max_num_seqs": 1, "block_size": BLOCK}
    options["num_gpu_blocks_override"] = setup["window"] // BLOCK + 1
    if "threshold" in setup:
        from specheads.integrations.vllm import register

        register()
        # The pair's draft, saved again
        given = {"head": setup["head"], "threshold": setup["threshold"], "any_draft": True}
        options |= {"additional_config": {"specheads": given}, "async_scheduling": False}
    if setup["drafted"]:
        drafting = {"method": "draft_model", "model": setup["draft_folder"]}
        options["speculative_config"] = drafting | {"num_speculative_tokens": setup["drafted"]}
    model = vllm.LLM(**options)
    repair_sampling()

    engine = model.llm_engine
    names = count()

    def generate(options: object, prompt: list[int], length: int, seed: int) -> Answer:
        sampling = {"max_tokens": length, "ignore_eos": True, "detokenize": False, **setup["warp"]}
        start = time.perf_counter()
        engine.add_request(
            str(next(names)),
            {"prompt_token_ids": prompt},
            vllm.SamplingParams(seed=seed, **sampling),
        )
        while True:
            for output in engine.step():
                if output.finished:
                    seconds = time.perf_counter() - start
                    return {"seconds": seconds, "response": list(output.outputs[0].token_ids)}

    return {"vllm": vllm.__version__}, generate


def repair_sampling() -> None:
    """Replace two functions of vLLM 0.32, without which it cannot sample with a draft model on a
    CPU.

    The one that spreads a request's temperature and top-k over its drafted tokens writes into a
    copy, so both are undefined; top-k itself fails in a round without a drafted token.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    def spread(
        values: "Tensor",
        ends: "Tensor",
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> "Tensor":
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)

    top_k = topk_topp_sampler.apply_top_k_only
    rejection_sampler.expand_batch_to_tokens = spread
    topk_topp_sampler.apply_top_k_only = lambda logits, k: (
        top_k(logits, k) if len(logits) else logits
    )


if __name__ == "__main__":
    serve(_make)
