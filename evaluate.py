"""`python evaluate.py model=llama2-7b head=latest`: what `specheads evaluate` does, from the source tree."""

from specheads.commands.evaluate import main

if __name__ == "__main__":
    main()
