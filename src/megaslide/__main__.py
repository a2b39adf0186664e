"""`python -m megaslide`: the command line where the console script is not on PATH."""

from megaslide.cli import main

if __name__ == "__main__":
    main()
