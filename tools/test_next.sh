#!/usr/bin/env bash
# Run the tests of the border to Megatron against a checkout of Megatron-LM in the wheel's place.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
    cat <<'USAGE'
usage: tools/test_next.sh VENV MEGATRON [WHAT ...]

Runs tests against the checkout of Megatron-LM in the folder MEGATRON, which stays as it is.

  VENV      environment with all other packages; tools/make_venv.sh makes one
  MEGATRON  folder of the checkout
  WHAT      for pytest; default: the tests that read Megatron's arguments, replace its names and
            train through its loop
USAGE
}

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    usage
    exit
fi
if [[ $# -lt 2 ]]; then
    usage >&2
    exit 2
fi
python=$1/bin/python checkout=$2
shift 2
if [[ ! -e $checkout/megatron/core/package_info.py ]]; then
    echo "error: '$checkout' is no checkout of Megatron-LM (it has no megatron/core): give the" \
        "folder, for instance make test-next MEGATRON=../Megatron-LM" >&2
    exit 2
fi
if [[ $# -eq 0 ]]; then
    set -- tests/unit/test_host_flags.py tests/unit/test_patches.py \
        tests/unit/test_on_cpu_table.py tests/unit/test_training_arguments.py \
        tests/unit/test_run_arguments.py tests/unit/test_packing_training.py \
        tests/unit/test_saved_checkpoints.py tests/unit/test_multi_token.py \
        tests/integration/test_host_border.py tests/integration/test_host_argument_sets.py \
        tests/distributed/test_training_curves.py tests/distributed/test_router.py \
        tests/distributed/test_host_flag_curves.py
fi

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cp -r "$checkout/megatron" "$folder/megatron"
# Compiled helpers of datasets are not in a checkout; the wheel's do for all versions of 0.19 and
# 0.20, and need no compiler.
datasets=$folder/megatron/core/datasets
if ! compgen -G "$datasets/helpers_cpp*.so" >/dev/null; then
    wheel=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    cp "$wheel"/megatron/core/datasets/helpers_cpp*.so "$datasets"
fi
export MEGATRON_CHECKOUT=$checkout PYTHONPATH=$folder:$PWD NO_VCS_VERSION=1
"$python" -c 'from megatron.core.package_info import __version__, __file__
print(f"Megatron {__version__} of {__file__}")'
"$python" -m pytest -n "${WORKERS:-logical}" --dist loadfile "$@"
