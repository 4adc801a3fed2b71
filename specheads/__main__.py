"""`python -m specheads <verb>`: the `specheads` command."""

from specheads.commands.start import main

if __name__ == "__main__":
    main()
