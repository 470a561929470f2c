#!/bin/sh
# usage: test_calibrate.sh TINYLM TA MODEL: `ta calibrate` says of the costs that tinylm saves what tinylm says of them.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
head -c 800 "$3/sample.txt" >"$folder/text"
"$1" calibrate --model "$3" --text "$folder/text" --most-bits 8 --save-costs "$folder/costs" --save-head-map "$folder/map" >"$folder/tinylm"
"$2" calibrate "$folder/costs" --bits 3 --json -o "$folder/same_map" >"$folder/ta"
[ "$(tr -d ' \n' <"$folder/map")" = "$(tr -d ' \n' <"$folder/same_map")" ]
for names in sum_of_single_heads:cost sum_standard_error:cost_error regret:regret certain:certain; do
    of_tinylm=$(sed -n "s/^${names%:*}: //p" "$folder/tinylm")
    of_ta=$(sed -n "s/^ \"${names#*:}\": \(.*\),$/\1/p" "$folder/ta")
    echo "$names $of_tinylm $of_ta"
    awk "BEGIN { a = $of_tinylm; d = a - $of_ta; exit !(a > 0 && d * d <= a * a * 1e-8) }"
done
