#!/usr/bin/env bash
# Runs what package.sh built: tests, then measurements. Arguments name what to run; see README.md.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
results=${RESULTS:-$here/results}
mkdir -p "$results"
# Tests look for their fixtures where they were built.
root=$(cat "$here/root")
[ -e "$root" ] || { mkdir -p "$(dirname "$root")" && ln -s "$PWD" "$root"; }
export KVERN_TEST_DEVICE=cuda
failed=0
for test in "$@"; do
    echo "== $test"
    "$here/$test" --test-threads=1 >"$results/$test.log" 2>&1 || failed=1
    grep -E "^test |panicked|^test result|^assertion|^  (left|right)" "$results/$test.log" | cut -c1-220
    grep -A2 "panicked" "$results/$test.log" | head -40 | cut -c1-300
done
exit $failed
