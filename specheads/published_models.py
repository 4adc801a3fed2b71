"""The models of conf/model on the hub: how large they are and under which licence, known before anything is downloaded."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PublishedModel:
    """A model on the hub: its number of parameters, its licence, and whether that must be accepted there before a download."""

    num_parameters: int
    licence: str
    gated: bool = False


_LLAMA2, _QWEN, _OPT = "Llama 2 Community License", "Apache-2.0", "OPT licence, for research"
_BLOOM = "BigScience BLOOM RAIL 1.0"
PUBLISHED = {
    "meta-llama/Llama-2-7b-chat-hf": PublishedModel(6_738_415_616, _LLAMA2, gated=True),
    "meta-llama/Llama-2-13b-chat-hf": PublishedModel(13_015_864_320, _LLAMA2, gated=True),
    "meta-llama/Llama-2-70b-chat-hf": PublishedModel(68_976_648_192, _LLAMA2, gated=True),
    "meta-llama/Llama-2-13b-hf": PublishedModel(13_015_864_320, _LLAMA2, gated=True),
    "meta-llama/Llama-3.2-1B-Instruct": PublishedModel(1_235_814_400, "Llama 3.2 Community License", gated=True),
    "meta-llama/Llama-3.1-8B-Instruct": PublishedModel(8_030_261_248, "Llama 3.1 Community License", gated=True),
    "huggyllama/llama-7b": PublishedModel(6_738_415_616, "LLaMA licence, for research"),
    "JackFram/llama-68m": PublishedModel(68_030_208, "Apache-2.0"),
    "JackFram/llama-160m": PublishedModel(162_417_408, "Apache-2.0"),
    "facebook/opt-125m": PublishedModel(125_239_296, _OPT),
    "facebook/opt-350m": PublishedModel(331_196_416, _OPT),
    "facebook/opt-13b": PublishedModel(12_853_473_280, _OPT),
    "bigscience/bloom-560m": PublishedModel(559_214_592, _BLOOM),
    "bigscience/bloom-7b1": PublishedModel(7_069_016_064, _BLOOM),
    "EleutherAI/pythia-70m": PublishedModel(70_426_624, "Apache-2.0"),
    "EleutherAI/pythia-2.8b": PublishedModel(2_775_208_960, "Apache-2.0"),
    "HuggingFaceTB/SmolLM2-135M-Instruct": PublishedModel(134_515_008, "Apache-2.0"),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": PublishedModel(1_711_376_384, "Apache-2.0"),
    "Qwen/Qwen3-0.6B": PublishedModel(596_049_920, "Apache-2.0"),
    "Qwen/Qwen3-8B": PublishedModel(8_190_735_360, "Apache-2.0"),
    "Qwen/Qwen3-32B": PublishedModel(32_762_123_264, "Apache-2.0"),
}
