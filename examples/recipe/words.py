"""Print the words of a text, quoted as in a shell, each with a zero byte behind it.

    python examples/recipe/words.py "--rope-parameters '{\"factor\": 2.0}' --lr 1e-5"

Only quotes and backslashes mean something; nothing is expanded or run.
"""

import shlex
import sys

try:
    words = shlex.split(sys.argv[1])
except ValueError as error:  # a quote that is not closed
    sys.exit(f"error: {error}")
sys.stdout.buffer.write(b"".join(word.encode(errors="surrogateescape") + b"\0" for word in words))
