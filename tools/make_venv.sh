#!/usr/bin/env bash
# Make a virtual environment with this package and pinned versions of all it needs.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source-path=SCRIPTDIR source=venv_aside.sh
source tools/venv_aside.sh

usage() {
    cat <<'USAGE'
usage: tools/make_venv.sh DIR [WHAT ...]

Makes the virtual environment DIR with the versions of requirements/constraints.txt; one that is
there is replaced, and kept if the new one cannot be finished.

  DIR        folder of the environment, from the root of the clone
  WHAT       for pip install: packages, -r FILE or -e PATH; default: -e '.[dev,plot,fast]', which is
             this package with its tests, plots and fast tokenizers (about 6 GB: torch)
  PYTHON=... the interpreter, 3.12 or later: a command, a path, or a version such as 3.13;
             default: the first that is found
  CONSTRAINTS=... a file of versions for pip; default: requirements/constraints.txt

example: PYTHON=/opt/python3.12/bin/python tools/make_venv.sh .venv
USAGE
}

for word in "$@"; do
    case $word in
        -h | --help)
            usage
            exit
            ;;
        -r | -e) ;;
        -*)
            echo "error: unknown option $word; --help lists what there is" >&2
            exit 2
            ;;
    esac
done
if [[ $# -eq 0 ]]; then
    usage >&2
    exit 2
fi
venv=$1
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
    local candidate candidates pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
    if [[ ${PYTHON:-} =~ ^3\.[0-9]+$ ]]; then
        candidates=("python$PYTHON" "$pyenv/$PYTHON".*/bin/python)
    elif [[ -n ${PYTHON:-} ]]; then
        candidates=("$PYTHON")
    else
        candidates=(python3.12 python3.13 python3 python "$pyenv"/3.1[2-9]*/bin/python)
    fi
    for candidate in "${candidates[@]}"; do
        if command -v "$candidate" >/dev/null 2>&1 && is_usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    if [[ -n ${PYTHON:-} ]]; then
        echo "error: PYTHON=$PYTHON: no such Python >= 3.12 with the venv module" >&2
        return 2
    fi
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
set_aside "$venv"
echo "Setting up $venv with $("$python" --version) from $python$size"
"$python" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --upgrade pip
"$venv/bin/python" -m pip install --quiet -c "${CONSTRAINTS:-requirements/constraints.txt}" "$@"
touch "$venv/.ready"
