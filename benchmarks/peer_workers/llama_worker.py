"""llama.cpp's server, alone or with a draft model, for `benchmarks/decoding.py`.

Needs xllamacpp, a wheel of llama.cpp. Its seconds are those that the server reports for reading the
prompt and for the response. A draft's length is fixed when the server starts, so each length is a
process.
"""

import json
import socket
from collections.abc import Mapping
from importlib.metadata import version
from urllib.request import Request, urlopen

import xllamacpp
from processes import Answer, Generate, serve

# As Warp does: top-p keeps tokens of the distribution at the temperature. llama.cpp's default is
# the temperature at the end.
SAMPLERS = ("top_k", "temperature", "top_p")


def _make(setup: Mapping[str, object]) -> tuple[Mapping[str, str], Generate]:
    """Start a server and return its version and what asks it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    params = xllamacpp.CommonParams()
    params.model.path = setup["file"]
    params.n_ctx = setup["window"]
    params.n_parallel = 1
    params.port = port
    params.cache_ram_mib = 0
    drafting = params.speculative.draft
    for part in (params, drafting):
        part.cpuparams.n_threads = part.cpuparams_batch.n_threads = setup["threads"]
    if setup["drafted"]:
        drafting.mparams.path = setup["draft_file"]
        drafting.n_max = setup["drafted"]
        # Samples drafts, and verifies them as Leviathan et al. (2023) do
        drafting.probabilistic = setup["warp"]["temperature"] > 0
        simple = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        params.speculative.types = [simple]
    server = xllamacpp.Server(params)
    warp = setup["warp"]
    sampling = {"samplers": ["top_k"], "top_k": 1}
    if warp["temperature"]:
        sampling = {"samplers": SAMPLERS, **warp}

    def generate(options: object, prompt: list[int], length: int, seed: int) -> Answer:
        body = {"prompt": prompt, "n_predict": length, "seed": seed, "ignore_eos": True}
        body |= {"cache_prompt": False, "return_tokens": True}
        data = json.dumps(body | sampling).encode()
        headers = {"Content-Type": "application/json"}
        asked = Request(f"{server.listening_address}/completion", data, headers)
        with urlopen(asked) as answered:
            answer = json.load(answered)
        timings = answer["timings"]
        seconds = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
        return {"response": answer["tokens"], "seconds": seconds}

    return {"xllamacpp": version("xllamacpp")}, generate


if __name__ == "__main__":
    serve(_make)
