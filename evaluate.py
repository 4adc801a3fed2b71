"""`python evaluate.py model=llama2-7b head=latest`: what `specheads evaluate` does, from the source
tree.
"""

from specheads.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # during the imports of the command

    from specheads.commands.command import CommandLine

    CommandLine("evaluate").run()
