"""`python train.py model=llama2-7b`: what `specheads train` does, from the source tree."""

from specheads.__main__ import main

if __name__ == "__main__":
    main("train")
