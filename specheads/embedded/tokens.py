"""From functions to tokens: the tokenizer of an embedded pair and the stream it trains on."""

from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from specheads.embedded.corpus import Function
from specheads.embedded.recipe import MAX_POSITIONS, VOCAB_SIZE

BOS, EOS = "<s>", "</s>"


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that puts a begin token first and never merges across a line break."""
    tokenizer = Tokenizer(models.BPE())
    line_breaks = pre_tokenizers.Split(Regex("\n"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([line_breaks, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[BOS, EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, functions: Sequence[Function]) -> torch.Tensor:
    """Return all functions as one stream (N,) int16: begin token, prompt, body, end token, and so on."""
    backend, eos = tokenizer.backend_tokenizer, tokenizer.eos_token_id
    encoded = backend.encode_batch([function.prompt + function.body for function in functions])
    return torch.from_numpy(np.concatenate([np.array([*row.ids, eos], dtype=np.int16) for row in encoded]))
