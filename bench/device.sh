#!/bin/sh
# The check on a GPU, for a machine without network (docs/gpu.md).
#
#   bench/device.sh prepare    where there is a network: fetch wheels of small packages that the other machine may lack
#   bench/device.sh [options]  there: run everything in under eight minutes; the options are those of bench.device
#
# Installs nothing. Results go to $OUT, default ./device-out. PYTHON names the interpreter that has torch.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
if [ "${1:-}" = prepare ]; then
    exec "$PYTHON" -m bench.device_packages prepare
fi
site=$("$PYTHON" -m bench.device_packages)
trap 'rm -rf "$site"' EXIT
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$PYTHON" -m bench.device "$@"
