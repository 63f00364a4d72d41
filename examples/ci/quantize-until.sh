#!/usr/bin/env bash
# quantize-until.sh SOURCE OUT [kvq quantize options]: quantize, but stop cleanly before the job's time limit.
#
# After LIMIT (default 340m) kvq gets SIGTERM, finishes the layer at work and ends with 143; the same command goes on
# from there. Writes state=done or state=continue, out and events to GITHUB_OUTPUT. Any other exit code is kvq's own
# (docs/exit-codes.md) and fails the step.
set -euo pipefail

source=$1 out=$2
shift 2
events="$out.events.jsonl"
mkdir -p "$(dirname "$out")"
outputs=${GITHUB_OUTPUT:-/dev/stdout}
printf 'out=%s\nevents=%s\n' "$out" "$events" >> "$outputs"

if [ -e "$out/kvq-manifest.json" ]; then
  echo "state=done" >> "$outputs" # an earlier job finished it; the checks that follow look at every byte
  exit 0
fi
code=0
timeout --preserve-status --signal=TERM --kill-after=15m "${LIMIT:-340m}" \
  kvq quantize "$source" --out "$out" --events "$events" "$@" || code=$?
case $code in
  0) echo "state=done" >> "$outputs" ;;
  143 | 137) echo "state=continue" >> "$outputs" ;;
  *) exit "$code" ;;
esac
