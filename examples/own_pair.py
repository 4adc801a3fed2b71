"""Decode with your own pair and a head: `python examples/own_pair.py <target> <draft> <head>
"<prompt>"`.

Models are folders or hub ids that transformers loads; the head is a folder that `specheads train`
exported for this draft.
"""

import sys

import specheads


def main(target: str, draft: str, head: str, prompt: str) -> None:
    """Print a response as it is decoded, and what speculation was worth."""
    # Greedy
    pair = specheads.load_pair(target=target, draft=draft)
    warp = specheads.Warp(temperature=0)
    rule = specheads.stopping.HeadThreshold(specheads.load_head(head), threshold=0.7)
    decoder = specheads.SpeculativeDecoder(pair, stopping=rule, warp=warp)
    decoder.warm_up()  # compiles now, so that the times below are those of decoding
    for piece in decoder.stream(prompt, max_new_tokens=128, seed=0):
        print(piece, end="", flush=True)
    speculative = decoder.generate(prompt, max_new_tokens=128, seed=0).stats
    alone = specheads.generate_baseline(pair, prompt, max_new_tokens=128, warp=warp).stats
    print(
        f"\n{speculative.tokens_per_second:.0f} tokens/s for {alone.tokens_per_second:.0f} of the"
        f" target alone; {speculative.block_efficiency:.2f} tokens per forward pass of the target"
    )


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
