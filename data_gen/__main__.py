"""`python -m data_gen model=llama2-7b`: what `specheads data` does."""

from specheads.__main__ import main

if __name__ == "__main__":
    main("data")
