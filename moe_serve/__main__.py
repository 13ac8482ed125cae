"""`python -m moe_serve`: the command line without its entry point script."""

from moe_serve.cli import main

if __name__ == "__main__":
    main()
