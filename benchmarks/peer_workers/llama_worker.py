"""llama.cpp through the functions of llama-cpp-python, for `benchmarks/peers.py`. Runs where that package is installed."""

import ctypes
import time
from collections.abc import Mapping
from typing import Any

import llama_cpp
from protocol import Request, answers, serve, settings

CACHE_TYPES = {"float32": 0, "bfloat16": 30}  # of ggml


class Llama:
    """A target and its context."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.setup = setup
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(setup["file"].encode(), model_params)
        if not self.model:
            raise OSError(f"llama.cpp cannot load {setup['file']}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = setup["window"]
        params.n_threads = params.n_threads_batch = setup["threads"]
        params.type_k = params.type_v = CACHE_TYPES[setup["dtype"]]
        params.flash_attn_type = -1 if setup["flash_attention"] else 0
        params.no_perf = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(64, 0, 1)

    def generate(self, options: Mapping[str, Any], greedy: bool, prompt: list[int], length: int, seed: int) -> tuple:
        """Return a response and the seconds of the whole call, the making of the sampler included."""
        start = time.perf_counter()
        sampler = self._sampler(greedy, seed)
        self._read(prompt)
        response = []
        token = (llama_cpp.llama_token * 1)()
        while True:
            token[0] = llama_cpp.llama_sampler_sample(sampler, self.context, -1)
            response.append(token[0])
            if len(response) == length:
                break
            self._decode(llama_cpp.llama_batch_get_one(token, 1))
        seconds = time.perf_counter() - start
        llama_cpp.llama_sampler_free(sampler)
        return response, seconds

    def forward(self, request: Request) -> list[float]:
        """Return the seconds of decoding so many tokens at once, with the logits of all of them, as far as the length."""
        rows, prompt = request["rows"], request["prompt"]
        self._read(prompt)
        seconds = []
        for begin in range(len(prompt), len(prompt) + request["length"] - rows, rows):
            self._fill(prompt[:rows], begin)
            start = time.perf_counter()
            self._decode(self.batch)
            llama_cpp.llama_get_logits(self.context)  # waits for them
            seconds.append(time.perf_counter() - start)
        return seconds

    def _sampler(self, greedy: bool, seed: int) -> ctypes.c_void_p:
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        parts = [llama_cpp.llama_sampler_init_greedy()]
        if not greedy:
            parts = [llama_cpp.llama_sampler_init_top_k(self.setup["top_k"])]
            parts += [llama_cpp.llama_sampler_init_temp(self.setup["temperature"]), llama_cpp.llama_sampler_init_dist(seed)]
        for part in parts:
            llama_cpp.llama_sampler_chain_add(chain, part)
        return chain

    def _read(self, prompt: list[int]) -> None:
        llama_cpp.llama_memory_clear(self.memory, False)
        tokens = (llama_cpp.llama_token * len(prompt))(*prompt)  # the batch points to it
        self._decode(llama_cpp.llama_batch_get_one(tokens, len(prompt)))

    def _fill(self, tokens: list[int], begin: int) -> None:
        self.batch.n_tokens = len(tokens)
        for row, token in enumerate(tokens):
            self.batch.token[row], self.batch.pos[row], self.batch.logits[row] = token, begin + row, True
            self.batch.n_seq_id[row], self.batch.seq_id[row][0] = 1, 0

    def _decode(self, batch: llama_cpp.llama_batch) -> None:
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")


def main() -> None:
    with answers() as channel:
        llama = Llama(settings())
        serve(channel, {"llama-cpp-python": llama_cpp.__version__}, llama.generate, llama.forward)


if __name__ == "__main__":
    main()
