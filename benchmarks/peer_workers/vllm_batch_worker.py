"""vLLM on a CPU with many requests at once, for `benchmarks/vllm_heads.py`. Runs where vLLM is installed."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol import Request, answers, serve, settings
from vllm_worker import repair_sampling

sys.path.insert(0, str(Path(__file__).parents[2]))


BLOCK = 32  # tokens


class Engine:
    """vLLM in this process: alone, with its draft model, with a head on that, or with the class that runs the draft itself."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
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
        self.setup, self.module = setup, vllm
        options: dict[str, Any] = {"model": setup["folder"], "dtype": setup["dtype"], "max_model_len": setup["window"]}
        options |= {"enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": True}
        options |= {"max_num_seqs": setup["requests"], "async_scheduling": False}
        # No more KV memory than all requests take, as there are many of these processes.
        options |= {"block_size": BLOCK, "num_gpu_blocks_override": setup["requests"] * (setup["window"] // BLOCK + 1)}
        drafted: dict[str, Any] = {"method": "draft_model", "model": setup["draft_folder"]}
        drafted["num_speculative_tokens"] = setup["drafted"]
        drafted["draft_sample_method"] = setup.get("method", "greedy")
        if "bounds" in setup:  # by the number of requests
            drafted["num_speculative_tokens_per_batch_size"] = setup["bounds"]
        if setup["kind"] == "head":
            from specheads.integrations.vllm import register

            register()
            given = {"head": setup["head"], "threshold": setup["threshold"]}
            options["additional_config"] = {"specheads": given | {"any_draft": True}}  # the pair's draft, written anew
        if setup["kind"] != "plain":
            options["speculative_config"] = drafted
        self.model = vllm.LLM(**options)
        repair_sampling()

    def generate(self, request: Request) -> tuple[list[list[int]], float]:
        """Return the responses to prompts that come at once, and the seconds of all of them."""
        chosen = {"temperature": 0.0} if request["greedy"] else {"temperature": 1.0, "top_k": 50}
        params = [
            self.module.SamplingParams(max_tokens=request["length"], ignore_eos=True, detokenize=False, seed=seed, **chosen)
            for seed in request["seeds"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
        start = time.perf_counter()
        out = self.model.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in out], time.perf_counter() - start


def main() -> None:
    with answers() as channel:
        engine = Engine(settings())
        serve(channel, {"vllm": engine.module.__version__}, together=engine.generate)


if __name__ == "__main__":
    main()
