"""`python -m rankscope`: the same as the command `rankscope`."""

from rankscope.cli.app import main

if __name__ == "__main__":
    main()
