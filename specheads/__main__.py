"""`python -m specheads <verb>`: the `specheads` command."""

from specheads.commands.main import main

if __name__ == "__main__":
    main()
