#!/usr/bin/env bash
# Make a virtual environment with this package and pinned versions of all it needs.
# Usage: tools/make_venv.sh DIR [WHAT...]     (PYTHON=/path/to/python chooses the interpreter)
# WHAT is for pip, instead of this package with its extras dev, plot and fast.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:?usage: tools/make_venv.sh DIR [WHAT...]}
shift
size=""
if [ $# -eq 0 ]; then
    set -- -e '.[dev,plot,fast]'
    size=" (a few minutes, about 6 GB: torch)"
fi

is_usable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.12 python3.13 python3 python \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        if command -v "$candidate" >/dev/null 2>&1 && is_usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    cat >&2 <<'MESSAGE'
No Python >= 3.12 with the venv module was found (megatron-core 0.19 needs 3.12).
Install one and run again:
  Debian/Ubuntu   apt-get install python3.12 python3.12-venv
  any system      pyenv install 3.12, or: uv python install 3.12
or name it:       PYTHON=/path/to/python3.12 make test
MESSAGE
    return 1
}

python=$(find_python)
echo "Setting up $venv with $("$python" --version) from $python$size"
rm -rf "$venv"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet -c requirements/constraints.txt "$@"
touch "$venv/.ready"
