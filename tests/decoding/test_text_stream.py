"""A stream's pieces are the text of all its tokens, whatever bytes these hold."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specheads.decoding.text_stream import TextStream

WORDS = ["▁def", "▁x", "中", "é", "\n", ":"]


def byte_fallback():
    """A tokenizer as Llama 2's: some words, and the 256 bytes for all that they do not spell."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), 256 + len(WORDS)


def byte_level():
    """A tokenizer as GPT-2's: each byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), 256


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
@pytest.mark.parametrize("seed", range(5))
def test_pieces_are_the_whole_text_also_of_invalid_bytes(nano, make, seed):
    tokenizer, size = make()
    pair = replace(nano, tokenizer=tokenizer)
    generator = torch.Generator().manual_seed(seed)
    texts = 0
    for _ in range(60):
        length = int(torch.randint(1, 30, (), generator=generator))
        tokens = torch.randint(0, size, (length,), generator=generator)
        # Words and the bytes of characters are likelier than by chance
        spelled = torch.tensor([*"中é€".encode(), *range(size - 6, size)])
        chosen = spelled[torch.randint(0, len(spelled), (length,), generator=generator)]
        tokens = torch.where(torch.rand(length, generator=generator) < 0.7, chosen, tokens)
        response = tokens.tolist()
        stream = TextStream(pair)
        pieces = []
        end = 0
        while end < length:
            end = min(length, end + int(torch.randint(1, 5, (), generator=generator)))
            pieces.append(stream.next_piece(response[:end], has_ended=end == length))
        assert "".join(pieces) == pair.decode(response)
        texts += len([piece for piece in pieces if piece]) > 1
    assert texts > 20  # most come in pieces
