# Sets RESUME_FROM to the newest whole checkpoint of the attempts in $run, if there is one. The last step's is left out:
# what is repeated after the one before it is judged.
newest() {
    local folder step newest=0
    for folder in "$run"/attempt-*/checkpoint/step-*; do
        [[ -f $folder/.metadata && -f $folder/recipe.json ]] || continue
        step=${folder##*/step-}
        if ((step < steps && step > newest)); then newest=$step RESUME_FROM=$folder; fi
    done
}
# Waits until process $1 has ended, and sets its exit code. If the job was told to end meanwhile, so is the process.
finish() {
    [[ -z $told ]] || kill -TERM "$1"
    while :; do
        wait "$1"
        code=$?
        kill -0 "$1" 2>/dev/null || break # a trap interrupts wait
    done
}
say() { printf 'primus: %s\n' "$*" >&2; }
