#!/usr/bin/env bash
# Builds everything that a machine with a GPU, but without Rust and without a network, needs to test and measure Kvern, into one folder:
#
#     tools/gpu/package.sh target/gpu
#
# Copy this repository and that folder there, and run `target/gpu/run.sh` as README.md beside this file says.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:?usage: package.sh FOLDER}
mkdir -p "$out"
cargo build --release --bin kvern
strip -o "$out/kvern" target/release/kvern
# The executable of a test or benchmark, from what cargo says of its build.
executable() {
    python3 -c 'import json,sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable") and message["target"]["name"] == sys.argv[1]: print(message["executable"])' "$1"
}
# The tests that run on every kernel set, under the name of crate and file.
tests=(kvern-backend:products kvern-backend:attention kvern-backend:recurrent kvern-backend:images kvern-backend:programs
       kvern-models:oracle kvern-engine:promise)
for test in "${tests[@]}"; do
    crate=${test%:*} name=${test#*:}
    binary=$(cargo test --release -p "$crate" --test "$name" --no-run --message-format=json | executable "$name")
    strip -o "$out/$name" "$binary"
done
bench=$(cargo bench -p kvern --bench gpu --no-run --message-format=json | executable gpu)
strip -o "$out/bench" "$bench"
pwd >"$out/root"
cp tools/gpu/run.sh "$out/run.sh"
ls -l "$out"
