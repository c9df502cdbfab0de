# The nodes of a job share the folder of the claim. Kubernetes starts each pod again by itself, so the pods agree on an
# attempt by files: node 0 makes turn-N when all others are here, and every node takes its seat in it once. A pod whose
# seat is taken is the second of its node: it notes that the first one is lost, on which the others end, too.
set -u
shopt -s nullglob
index=${JOB_COMPLETION_INDEX:-0} child= told= waits=
stuck=3 # attempts in a row that may end without a new checkpoint
trap 'told=1; [[ -z $child ]] || kill -TERM "$child"' TERM
pause() {
    [[ -z $told ]] || exit 143
    [[ $waits == "$*" ]] || say "waiting for $*"
    waits=$*
    sleep 2
}
turns() { local all=("$run"/turn-*); echo ${#all[@]}; }
absent() { for ((i = 1; i < nodes; i++)); do [[ -e $run/here-$i ]] || printf ' %s' "$i"; done; }
mkdir -p "$run" || exit 3
n=$(turns)
if [[ -e $run/turn-$((n - 1))/seat-$index ]]; then
    notes=$run/attempt-$((n - 1))/cache/failures
    mkdir -p "$notes"
    text='{"time": %s, "rank": %s, "text": "node %s was lost"}'
    printf "$text" "$(date +%s)" $((index * ranks)) "$index" > "$notes/.pod-$index"
    mv "$notes/.pod-$index" "$notes/pod-$index.json"
fi
if [[ $index == 0 ]]; then
    while others=$(absent); [[ -n $others && ! -e $run/done ]]; do pause "the pods of nodes$others"; done
    RESUME_FROM=$resume
    newest
    same=$(for turn in "$run"/turn-*; do cat "$turn/resume"; done | tail -n "$stuck" | grep -cFx "from $RESUME_FROM")
    if ((same == stuck)); then
        say "$stuck attempts ended without a new checkpoint; the reason is in $run/attempt-$((n - 1))/log.txt"
        exit 2
    fi
    mkdir -p "$run/.turn" && echo "from $RESUME_FROM" > "$run/.turn/resume" && mv "$run/.turn" "$run/turn-$n" || exit 3
else
    touch "$run/here-$index"
    until n=$(($(turns) - 1)); [[ -e $run/done || ($n -ge 0 && ! -e $run/turn-$n/seat-$index) ]]; do
        pause "node 0, which begins an attempt when every pod runs"
    done
    rm -f "$run/here-$index"
fi
[[ ! -e $run/done ]] || exit 0
mkdir "$run/turn-$n/seat-$index"
export RDZV_ID=$name-$n
resume=$(<"$run/turn-$n/resume")
resume=${resume#from }
say "attempt $n of node $index${resume:+, continuing from $resume}"
run_ranks --output "$run/attempt-$n" ${resume:+--resume-from "$resume"} &
child=$!
finish "$child"
[[ $code != 0 || $index != 0 ]] || touch "$run/done"
# Checks that fail after a run that ended well would fail again.
[[ $code != 1 || $index != 0 ]] || ! grep -qs '^  "exit_code": 0' "$run/attempt-$n/result.json" || exit 2
exit "$code"
