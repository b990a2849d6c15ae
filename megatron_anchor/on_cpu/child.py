"""Run in a spawned child process before anything else there: enables the replacements."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # the package may not be installed

from megatron_anchor.on_cpu import enable

enable(force=True)  # whoever started the parent has decided
