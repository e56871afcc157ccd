"""`python -m bench NAME [--quick] [--out FILE]`: runs one benchmark."""

import importlib
import sys

NAMES = ("cut",)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: python -m bench {{{','.join(NAMES)}}} [--quick] [--out FILE]")
    importlib.import_module(f"bench.{sys.argv[1]}").main(sys.argv[2:])
