"""How a data set is made: the settings of responses, and of the tokens that the draft samples along
them.
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from specheads.pair.generation_config import Warped
from specheads.prompts.prompt import ResponseLimits
from specheads.settings import (
    Count,
    NonNegativeNumber,
    PositiveCount,
    Seed,
    Settings,
    Text,
    count,
    setting,
)

_LARGEST_BATCH = 2**16  # responses; their key-value memory is allocated at once
# Settings that decide responses; the others decide what the draft samples along them.
RESPONSE_LIMITS = (
    "max_new_tokens",
    "max_prompt_tokens",
    "batch_size",
    "rows_per_shard",
    "responses_per_prompt",
)


class DataGeneration(Warped):
    """How responses, drafted tokens and acceptance probabilities are made.

    All of it is in the fingerprint.
    """

    # Of its own: three heads with seed=0, 1 and 2 learn from one data set, which is what costs.
    seed: Seed = setting(
        0, "the seed of the responses and of the drafted tokens along them", key="generation.seed"
    )
    max_new_tokens: PositiveCount = setting(
        512, "the largest number of tokens in a response", key="data.max_new_tokens"
    )
    max_prompt_tokens: PositiveCount = setting(
        1024,
        "the largest number of tokens in a prompt; longer prompts are left out",
        key="data.max_prompt_tokens",
    )
    batch_size: Annotated[int, count(1, _LARGEST_BATCH)] = setting(
        64,
        "the number of prompts that are answered together; fewer take less memory",
        key="generation.batch_size",
    )
    rows_per_shard: PositiveCount = setting(
        512,
        "the number of responses per file; a restart repeats the labels of one file at most",
        key="generation.rows_per_shard",
    )
    responses_per_prompt: PositiveCount = setting(
        1,
        "the number of responses to each train prompt; after the first, a greedy target's are"
        " sampled at temperature 1",
        key="generation.responses_per_prompt",
    )
    samples_per_position: PositiveCount = setting(
        4,
        "the number of tokens that the draft samples at each position; each epoch takes another",
        key="generation.samples_per_position",
    )
    runner: Literal["local", "vllm", "server", "ray"] = setting(
        "local",
        "who makes the data: this process; vLLM or a running server, the responses; or the workers"
        " of a Ray cluster",
    )
    vllm_python: Text | None = setting(
        None,
        "the Python interpreter of an environment with vLLM; null: this one",
        key="vllm.python",
        decides=False,
    )
    vllm_options: Mapping[str, object] = setting(
        {}, "more arguments of vllm.LLM, for example {tensor_parallel_size: 8}", key="vllm.options"
    )
    server_url: Text | None = setting(
        None,
        "the address of a server with OpenAI's completions (vLLM, SGLang, llama-server); its key is"
        " in the variable OPENAI_API_KEY",
        key="server.url",
        decides=False,
    )
    server_model: Text | None = setting(
        None, "the target's name there; null: the only model", key="server.model"
    )
    server_concurrency: PositiveCount = setting(
        32,
        "the number of requests that are under way at a time",
        key="server.concurrency",
        decides=False,
    )
    server_seconds: PositiveCount = setting(
        600, "the longest time for one response", key="server.seconds", decides=False
    )
    ray_address: Text | None = setting(
        None,
        "the address of a Ray cluster, auto for that of this machine; null: this machine alone",
        key="ray.address",
        decides=False,
    )
    ray_num_workers: PositiveCount = setting(
        2,
        "the largest number of workers, which begin as the cluster grows",
        key="ray.num_workers",
        decides=False,
    )
    ray_cpus_per_worker: PositiveCount = setting(
        1,
        "the number of CPUs, and of threads, of a worker",
        key="ray.cpus_per_worker",
        decides=False,
    )
    ray_gpus_per_worker: NonNegativeNumber = setting(
        0,
        "the number of GPUs of a worker; it has target and draft in its memory",
        key="ray.gpus_per_worker",
        decides=False,
    )
    ray_responses: Literal["local", "vllm"] = setting(
        "local",
        "who answers the prompts with runner=ray: the workers' processes, or vLLM in each of them",
        key="ray.responses",
        decides=False,
    )

    @property
    def limits(self) -> ResponseLimits:
        return ResponseLimits(self.max_new_tokens, self.max_prompt_tokens, self.batch_size)

    @property
    def by_vllm(self) -> bool:
        return "vllm" in (self.runner, self.ray_responses if self.runner == "ray" else None)

    @property
    def elsewhere(self) -> bool:
        """Whether responses are made outside this project's processes."""
        return self.by_vllm or self.runner == "server"

    def sizes(self) -> dict[str, object]:
        """Return limits and sizes by their keys in caches."""
        return {name: getattr(self, name) for name in RESPONSE_LIMITS} | {
            "draws_per_position": self.samples_per_position
        }


class OwnPrompts(Settings):
    """What the target is asked to write in place of users."""

    number: Count = setting(
        0,
        "how many prompts the target writes itself, and no data: a file for data.path=",
        key="own_prompts.number",
    )
    openings: tuple[Text, ...] = setting(
        (),
        "texts that its prompts begin with, in turn, '[Write,Explain]', \\n for a new line; none:"
        " as it likes",
        key="own_prompts.openings",
    )
