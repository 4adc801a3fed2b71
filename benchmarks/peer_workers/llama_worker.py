"""llama.cpp's server, alone or with a draft model, for `benchmarks/decoding.py`.

Needs xllamacpp, a wheel of llama.cpp.

Its seconds are those that the server reports for reading the prompt and for the response. A draft's
length is fixed when the server starts, so each length is a process.
"""

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import xllamacpp
from processes import Answer, Generate, serve

CACHE_TYPES = {"float32": "GGML_TYPE_F32", "bfloat16": "GGML_TYPE_BF16"}  # else its default
# As Warp does: top-p keeps tokens of the distribution at the temperature. llama.cpp's default is
# the temperature at the end.
SAMPLERS = ["top_k", "temperature", "top_p"]


def _make(setup: Mapping[str, Any]) -> tuple[Mapping[str, str], Generate]:
    """Start a server and return its build and what asks it."""
    params = xllamacpp.CommonParams()
    cache = getattr(xllamacpp.ggml_type, CACHE_TYPES.get(setup["dtype"], "GGML_TYPE_F16"))
    params.model.path = setup["file"]
    params.n_ctx = setup["window"]
    params.n_parallel = 1
    params.cache_ram_mib = 0
    drafting = params.speculative.draft
    types = xllamacpp.llama_flash_attn_type
    for part in (params, drafting):
        part.cache_type_k = part.cache_type_v = cache
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = setup["threads"]
    # On a CPU flash attention computes in half precision: it moves nano's logits by 0.015, all else
    # in float32 by 0.00001.
    attention = "DISABLED" if setup["dtype"] == "float32" else "AUTO"
    params.flash_attn_type = getattr(types, f"LLAMA_FLASH_ATTN_TYPE_{attention}")
    if setup["drafted"]:
        drafting.mparams.path = setup["draft_file"]
        drafting.n_max = setup["drafted"]
        drafting.probabilistic = (
            "sampled" in setup
        )  # samples drafts, and verifies them as Leviathan et al. (2023) do
        params.speculative.types = [
            xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        ]
    server = xllamacpp.Server(params)
    warp = setup["warp"]
    sampling = (
        {"samplers": SAMPLERS, **warp}
        if warp["temperature"]
        else {"samplers": ["top_k"], "top_k": 1}
    )

    def generate(
        options: object, prompts: list[list[int]], length: int, seeds: list[int]
    ) -> Answer:
        body = {"prompt": prompts[0], "max_tokens": length, "seed": seeds[0], "cache_prompt": False}
        answer = server.handle_completions(body | sampling)
        if "timings" not in answer:
            raise RuntimeError(f"llama.cpp answered {answer}")
        timings = answer["timings"]
        text = answer["choices"][0]["text"]
        tokens = [int(number) for number in re.findall(r"t(\d+)", text)]  # as write_gguf calls them
        return {
            "responses": [tokens],
            "seconds": (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3,
        }

    return {"xllamacpp": version("xllamacpp")}, generate


if __name__ == "__main__":
    serve(_make)
