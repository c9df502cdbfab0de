#!/bin/bash
# madengine runs this in the container. It takes its figure from the line "performance: NUMBER METRIC" of the log; a run
# that fails a check prints none, and ends with an error.
set -euo pipefail
if [[ -n ${MAD_SECRETS_HFTOKEN:-} ]]; then export HF_TOKEN=$MAD_SECRETS_HFTOKEN; fi
primus train "$@" --output run
primus report run --out report
python3 - <<'END'
import csv
with open("report/perf.csv", newline="") as file:
    run = next(csv.DictReader(file))
print("performance:", run["performance"], run["metric"])
END
