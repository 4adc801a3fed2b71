"""vLLM on a CPU, alone or with a draft model, for `benchmarks/peers.py`. Runs where vLLM is installed."""

import os
import time
from collections.abc import Mapping
from typing import Any

from protocol import answers, serve, settings


class Engine:
    """vLLM in this process; the number of drafted tokens is fixed when it starts."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one needs Triton
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # no process between this one and the models
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(told["threads"]),
        }
        import torch
        import vllm

        torch.set_num_threads(told["threads"])
        self.told, self.module = told, vllm
        options = {"model": told["folder"], "dtype": told["dtype"], "max_model_len": told["window"], "max_num_seqs": 1}
        options |= {"enforce_eager": not told["compiled"], "enable_prefix_caching": False, "disable_log_stats": True}
        if told.get("drafted"):
            drafted = {"method": "draft_model", "model": told["draft_folder"], "num_speculative_tokens": told["drafted"]}
            options["speculative_config"] = drafted
        self.model = vllm.LLM(**options)

    def generate(self, options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple:
        """Return a response and the seconds of the whole call."""
        chosen = {"temperature": 0.0} if greedy else {"temperature": self.told["temperature"], "top_k": self.told["top_k"]}
        params = self.module.SamplingParams(max_tokens=length, ignore_eos=True, detokenize=False, seed=seed, **chosen)
        start = time.perf_counter()
        out = self.model.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(out[0].outputs[0].token_ids), time.perf_counter() - start


def main() -> None:
    with answers() as channel:
        engine = Engine(settings())
        serve(channel, {"vllm": engine.module.__version__}, engine.generate)


if __name__ == "__main__":
    main()
