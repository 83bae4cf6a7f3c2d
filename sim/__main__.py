"""``python -m sim`` is ``cpkv``."""

from sim.cli import main

if __name__ == "__main__":
    main()
