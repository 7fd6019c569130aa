#!/usr/bin/env bash
# Fuzzes the patch decoder and the manifest parser for SECONDS each (60), in an environment of its own that this makes.
#     tests/fuzz/run.sh [SECONDS] [patch|manifest]
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-60}
targets=${2:-patch manifest}
venv=.venv-fuzz
if [[ ! -e $venv/.ready ]]; then
    .venv/bin/python -m venv "$venv"
    "$venv/bin/python" -m pip install -q -c constraints.txt atheris==3.0.0 -e . hypothesis pytest
    touch "$venv/.ready"
fi
for target in $targets; do
    corpus=build/fuzz/$target
    mkdir -p "$corpus"
    "$venv/bin/python" -m tests.fuzz.seeds "$corpus" "$target"
    "$venv/bin/python" -m tests.fuzz.fuzz_weights "$target" "$corpus" -max_total_time="$seconds" -timeout=5 \
        -rss_limit_mb=2048 -max_len=20000 -print_final_stats=1
done
