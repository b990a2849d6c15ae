#!/usr/bin/env bash
# Make an environment that sees all packages of BASE and has Transformer Engine's Python code too.
# It is apart because Megatron imports Transformer Engine wherever it finds it.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=venv_aside.sh
source tools/venv_aside.sh

usage() {
    cat <<'USAGE'
usage: tools/make_venv_te.sh BASE DIR

Makes the virtual environment DIR, which sees the packages of the environment BASE and has what
requirements/te.txt names. One that is there is replaced, and kept if the new one cannot be
finished.
USAGE
}

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    usage
    exit
fi
if [[ $# -ne 2 ]]; then
    usage >&2
    exit 2
fi
base=$1 venv=$2
if [[ ! -x $base/bin/python ]]; then
    echo "error: $base is no environment (it has no bin/python): tools/make_venv.sh makes one" >&2
    exit 2
fi

packages() {
    "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

set_aside "$venv"
echo "Setting up $venv over $base (about 500 MB: Transformer Engine's core library)"
"$base/bin/python" -m venv "$venv"
echo "import site; site.addsitedir('$(packages "$base")')" >"$(packages "$venv")/base.pth"
"$venv/bin/python" -m pip install --quiet --no-deps -r requirements/te.txt
touch "$venv/.ready"
