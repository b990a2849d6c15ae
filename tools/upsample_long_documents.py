"""Draw long documents more often; see docs/corpora.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_anchor.command_line import run
from megatron_anchor.corpus.cli_upsample import main

if __name__ == "__main__":
    sys.exit(run(main))
