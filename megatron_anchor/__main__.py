"""`python -m megatron_anchor`: the command `megatron-anchor`."""

import sys

from megatron_anchor.console import main

if __name__ == "__main__":
    sys.exit(main())
