"""Compare a Megatron checkpoint with a Hugging Face model; see docs/conversion.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_anchor.checkpoint.cli_verify import main
from megatron_anchor.command_line import run

if __name__ == "__main__":
    sys.exit(run(main))
