"""`python -m data_gen model=llama2-7b`: what `specheads data` does."""

from specheads.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # during the imports of the command

    from specheads.commands.data import main

    main()
