#!/usr/bin/env bash
# Make an environment that sees all packages of BASE and has Transformer Engine's Python code too.
# It is apart because Megatron imports Transformer Engine wherever it finds it.
# Usage: tools/make_venv_te.sh BASE DIR
set -euo pipefail
cd "$(dirname "$0")/.."
base=${1:?usage: tools/make_venv_te.sh BASE DIR}
venv=${2:?usage: tools/make_venv_te.sh BASE DIR}

packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

echo "Setting up $venv over $base (about 500 MB: Transformer Engine's core library)"
rm -rf "$venv"
"$base/bin/python" -m venv "$venv"
echo "import site; site.addsitedir('$(packages "$base")')" >"$(packages "$venv")/base.pth"
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements/te.txt
touch "$venv/.ready"
