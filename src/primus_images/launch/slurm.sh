set -uo pipefail
# Slurm announces preemption and the time limit by USR1. The ranks end first; the job then goes back to the queue.
# This comes first: the signal may arrive at any moment, and would end a script without a trap.
told= srun=
end() { told=$1; [[ -z $srun ]] || kill -TERM "$srun" 2>/dev/null; }
trap 'end USR1' USR1
trap 'end TERM' TERM
trap 'end REBOOT' USR2

run=$root/$SLURM_JOB_ID
attempt=${SLURM_RESTART_COUNT:-0}
export OUTPUT=$run/attempt-$attempt
mkdir -p "$run" || exit 3

# Ranks meet on the first node. Slurm's own address of a node can differ from its name.
address() { scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# When Slurm's daemon on a node has started. It starts anew with the node.
started() { scontrol show node --oneliner "$1" | sed -n 's/.* SlurmdStartTime=\([^ ]*\).*/\1/p'; }
declare -A starts
for node in "${nodes[@]}"; do starts[$node]=$(started "$node"); done
# The nodes and when they have booted, if Slurm knows.
booted() {
    scontrol show node --oneliner "$SLURM_JOB_NODELIST" | sed -n 's/^NodeName=\([^ ]*\) .* BootTime=\([0-9][^ ]*\).*/\1 \2/p'
}
declare -A boots
while read -r node boot; do boots[$node]=$boot; done < <(booted)
# This script runs on the first node, so it sees which ports are taken there. Those from 32768 on are for outgoing
# connections. Each attempt has another one, because one that cannot be opened need not answer.
listening() { timeout 1 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$1" "$2" 2>/dev/null; }
taken() { listening 127.0.0.1 "$1" || listening "$MASTER_ADDR" "$1"; }
free_port() {
    local port=$((20000 + (SLURM_JOB_ID + attempt) % 12000))
    while taken "$port"; do port=$((port + 1)); done
    echo "$port"
}
export MASTER_ADDR MASTER_PORT RDZV_ID=$SLURM_JOB_ID-$attempt NODE_ADDRESSES
MASTER_ADDR=$(address "${nodes[0]}")
if [[ -n $port ]] && taken "$port"; then
    say "--port $port is taken on node ${nodes[0]}: choose another one, or leave it out"
    exit 3
fi
MASTER_PORT=${port:-$(free_port)}
NODE_ADDRESSES=$(for node in "${nodes[@]}"; do address "$node"; done | tr '\n' ' ')

# A restarted job continues from the newest whole checkpoint of its earlier attempts.
export RESUME_FROM=$resume
newest
say "job $SLURM_JOB_ID, attempt $attempt, nodes ${nodes[*]}, meeting at $MASTER_ADDR:$MASTER_PORT"
[[ -z $RESUME_FROM ]] || say "continuing from $RESUME_FROM"

requeue() {
    if ((attempt >= restarts)); then
        say "$1; not requeued: this was attempt $attempt, and --restarts is $restarts"
        exit 1
    fi
    say "$1; requeued"
    scontrol requeue "$SLURM_JOB_ID" || exit 1
    sleep 60 # Slurm ends this script
    exit 1
}

# The step takes no GPU. Slurm refuses it if it inherits how many the job has, and as long as it does not know that the
# ranks have ended, whose memory it then counts. It learns that late after a restart of its own.
answers() {
    for _ in 1 2 3; do
        timeout 60 env -u SLURM_GPUS_PER_NODE -u SLURM_GPUS_PER_TASK \
            srun --overlap --gres=none --nodes=1 --ntasks=1 --nodelist="$1" --time=1 true >/dev/null 2>&1
        case $? in
            0) return 0 ;;
            124) return 1 ;; # no answer in time
        esac
        sleep 10
    done
    return 1
}

# Whether Slurm has told the ranks alone to end, because another job needs their nodes.
preempted() {
    local job start preemption
    job=$(scontrol show job --oneliner "$SLURM_JOB_ID")
    start=$(sed -n 's/.* StartTime=\([^ ]*\).*/\1/p' <<< "$job")
    preemption=$(sed -n 's/.* PreemptTime=\([0-9][^ ]*\).*/\1/p' <<< "$job")
    # That of an earlier attempt may still be there.
    [[ -n $preemption && ! $preemption < $start ]]
}

# Ends srun when a node has booted since the start. srun itself would wait for the node's ranks, and ranks that have not
# met would, too. The controller works the time of a boot out anew each time, so it varies by some seconds.
rebooted() { [[ -n $1 ]] && (($(date +%s -d "$2") > $(date +%s -d "$1") + 10)); }
pause() {
    sleep "$1" &
    sleeper=$!
    wait "$sleeper"
}
watch_boots() {
    local node boot sleeper=
    trap 'kill $sleeper; exit' TERM
    while pause 20; do
        while read -r node boot; do
            rebooted "${boots[$node]:-}" "$boot" && break 2
        done < <(booted)
    done
    kill -USR2 $$
    pause 60
    kill -KILL "$1"
}

run_ranks &
srun=$!
watch_boots "$srun" &
watcher=$!
finish "$srun"
kill "$watcher" 2>/dev/null
wait "$watcher"
((code == 0)) && exit 0
[[ $told == TERM ]] && exit "$code"
# While Slurm's controller is away, every node would seem lost.
until scontrol ping 2>/dev/null | grep -q ' is UP'; do sleep 5; done
[[ $told == USR1 ]] && requeue "the job was told to end"
preempted && requeue "the job was preempted"
# A node that does not answer explains the failure: the job runs again. Otherwise the worst exit code is the job's.
for node in "${nodes[@]}"; do
    answers "$node" || requeue "node $node does not answer"
    # It may be back before Slurm noticed that it was gone, and with it all that ran there.
    [[ $(started "$node") == "${starts[$node]}" ]] || requeue "node $node was restarted"
done
# The ranks open the port some seconds after it was chosen.
[[ -z $port ]] && grep -qs EADDRINUSE "$OUTPUT/log.txt" && requeue "port $MASTER_PORT was taken meanwhile"
[[ -s $OUTPUT/log.txt ]] && reason="in $OUTPUT/log.txt" || reason=above
say "failed with exit code $code; the reason is $reason"
exit "$code"
