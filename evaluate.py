"""`python evaluate.py model=llama2-7b head=latest`: what `specheads evaluate` does, from the source
tree.
"""

from specheads.__main__ import main

if __name__ == "__main__":
    main("evaluate")
