"""vLLM on a CPU, alone or with a draft model, for `benchmarks/peers.py`. Runs where vLLM is installed."""

import os
import time
from collections.abc import Mapping
from typing import Any

from protocol import answers, serve, settings


class Engine:
    """vLLM in this process; the number of drafted tokens is fixed when it starts."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one needs Triton
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process between this one and the models
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(setup["threads"]),
        }
        import torch
        import vllm

        torch.set_num_threads(setup["threads"])
        self.setup, self.module = setup, vllm
        options = {"model": setup["folder"], "dtype": setup["dtype"], "max_model_len": setup["window"], "max_num_seqs": 1}
        options |= {"enforce_eager": not setup["compiled"], "enable_prefix_caching": False, "disable_log_stats": True}
        if setup.get("drafted"):
            drafted = {"method": "draft_model", "model": setup["draft_folder"], "num_speculative_tokens": setup["drafted"]}
            options["speculative_config"] = drafted
        self.model = vllm.LLM(**options)
        repair_sampling()

    def generate(self, options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple:
        """Return a response and the seconds of the whole call."""
        chosen = {"temperature": 0.0} if greedy else {"temperature": self.setup["temperature"], "top_k": self.setup["top_k"]}
        params = self.module.SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, seed=seed, **chosen)
        start = time.perf_counter()
        out = self.model.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(out[0].outputs[0].token_ids), time.perf_counter() - start


def repair_sampling() -> None:
    """Replace two functions of vLLM 0.32, without which it cannot sample with a draft model on a CPU.

    The one that spreads a request's temperature and top-k over its drafted tokens writes into a copy, so both are undefined;
    top-k itself fails in a round without a drafted token.
    """
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    def spread(values: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Any:
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        return values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts)

    top_k = topk_topp_sampler.apply_top_k_only
    rejection_sampler.expand_batch_to_tokens = spread
    topk_topp_sampler.apply_top_k_only = lambda logits, k: top_k(logits, k) if len(logits) else logits


def main() -> None:
    with answers() as channel:
        engine = Engine(settings())
        serve(channel, {"vllm": engine.module.__version__}, engine.generate)


if __name__ == "__main__":
    main()
