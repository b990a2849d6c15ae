#!/usr/bin/env bash
# Install this package into a Python that has torch already, such as that of NVIDIA's PyTorch container,
# without replacing anything that is there: see docs/containers.md.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    echo "usage: tools/install_in_container.sh [--dry-run] [EXTRA ...]"
    echo "  --dry-run  resolve and print what would be installed"
    echo "  EXTRA      extras of this package: plot, eval, zstd, fast, ray"
    echo "PYTHON=python3 chooses the Python. Not te and flash: the container has them."
}

python=${PYTHON:-python3}
options=()
if [[ ${1-} == -h || ${1-} == --help ]]; then
    usage
    exit
fi
if [[ ${1-} == --dry-run ]]; then
    options=(--dry-run)
    shift
fi
for extra in "$@"; do
    if [[ ! $extra =~ ^(plot|eval|zstd|fast|ray)$ ]]; then
        usage >&2
        exit 2
    fi
done
extras=$(IFS=, && echo "$*")

"$python" - <<'PYTHON_CODE'
import sys
from importlib.metadata import PackageNotFoundError, version


def stop(message):
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


if sys.version_info < (3, 12):
    stop(f"Python {sys.version.split()[0]}; this package needs 3.12: take a newer container")
try:
    version("torch")
except PackageNotFoundError:
    stop(f"{sys.executable} has no torch to keep; use tools/make_venv.sh, or set PYTHON")
PYTHON_CODE

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# `pip freeze` would name wheels by the paths that they were built at, which no constraint may be.
"$python" -m pip list --format=freeze --disable-pip-version-check >"$work/before.txt"
grep -vE '^(pip|setuptools|wheel|megatron-core|megatron-anchor)==' "$work/before.txt" \
    >"$work/constraints.txt"
constraints=(-c "$work/constraints.txt")
# PIP_CONSTRAINT, which the container sets, would reach into the environment that our wheel is built
# in, where the container's setuptools may be too old. As an option it does not.
if [[ -n ${PIP_CONSTRAINT-} ]]; then
    for file in $PIP_CONSTRAINT; do
        grep -vE '^(pip|setuptools|wheel|megatron-core)([^A-Za-z0-9_.-]|$)' "$file" \
            >"$work/given-${#constraints[@]}.txt" || true
        constraints+=(-c "$work/given-${#constraints[@]}.txt")
    done
fi
env -u PIP_CONSTRAINT "$python" -m pip install --no-cache-dir --disable-pip-version-check \
    ${options[@]+"${options[@]}"} "${constraints[@]}" ".${extras:+[$extras]}"

"$python" -m pip list --format=freeze --disable-pip-version-check >"$work/after.txt"
changed=$(grep -vxFf "$work/after.txt" "$work/constraints.txt" || true)
if [[ -n $changed ]]; then
    echo "error: pip replaced what the container had; throw this image away:" >&2
    echo "$changed" >&2
    exit 1
fi
echo "nothing that was installed was replaced ($(wc -l <"$work/constraints.txt") packages)"
