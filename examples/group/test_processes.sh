#!/bin/sh
# usage: test_processes.sh GROUP MODEL: three ranks, started with the variables that torchrun sets.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export WORLD_SIZE=3
processes=
for rank in 0 1 2; do
    RANK=$rank LOCAL_RANK=$rank "$1" --model "$2" --bytes 16 --prompt-file "$0" --id-file "$folder/id" >"$folder/out$rank" &
    processes="$processes $!"
done
failed=0
for process in $processes; do wait "$process" || failed=1; done
cat "$folder"/out?
[ "$(cat "$folder"/out? | grep -c 'the same text')" -eq 3 ] && exit $failed
