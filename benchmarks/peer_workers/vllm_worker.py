"""vLLM on a CPU, for `benchmarks/peers.py` and `benchmarks/vllm_heads.py`. Runs where vLLM is installed.

It decodes alone, with its draft model, or with a head on that; the number of drafted tokens is fixed when it starts.
"""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol import Request, answers, serve, settings

sys.path.insert(0, str(Path(__file__).parents[2]))

BLOCK = 32  # tokens


class Engine:
    """vLLM in this process."""

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
        requests = setup.get("requests", 1)
        options: dict[str, Any] = {"model": setup["folder"], "dtype": setup["dtype"], "max_model_len": setup["window"]}
        options |= {"enforce_eager": not setup.get("compiled"), "enable_prefix_caching": False, "disable_log_stats": True}
        options["max_num_seqs"] = requests
        if "requests" in setup:  # no more KV memory than all of them take, as there are many of these processes
            options |= {"async_scheduling": False, "block_size": BLOCK}
            options["num_gpu_blocks_override"] = requests * (setup["window"] // BLOCK + 1)
        if "head" in setup:
            from specheads.integrations.vllm import register

            register()
            given = {"head": setup["head"], "threshold": setup["threshold"]}
            options["additional_config"] = {"specheads": given | {"any_draft": True}}  # the pair's draft, written anew
        if setup["drafted"]:
            drafted: dict[str, Any] = {"method": "draft_model", "model": setup["draft_folder"]}
            drafted |= {"num_speculative_tokens": setup["drafted"], "draft_sample_method": setup.get("method", "greedy")}
            if "bounds" in setup:  # by the number of requests
                drafted["num_speculative_tokens_per_batch_size"] = setup["bounds"]
            options["speculative_config"] = drafted
        self.model = vllm.LLM(**options)
        repair_sampling()

    def generate(self, options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple:
        """Return a response and the seconds of the whole call."""
        responses, seconds = self.together({"greedy": greedy, "prompts": [prompt], "length": length, "seeds": [seed]})
        return responses[0], seconds

    def together(self, request: Request) -> tuple[list[list[int]], float]:
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
        serve(channel, {"vllm": engine.module.__version__}, engine.generate, engine.together)


if __name__ == "__main__":
    main()
