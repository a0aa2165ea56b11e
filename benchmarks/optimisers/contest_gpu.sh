#!/bin/sh
# The contest on a GPU, in calls of at most nine minutes that go on where the one before stopped.
#
#     sh benchmarks/optimisers/contest_gpu.sh STAGE [FOLDER] [COMMIT]
#
# FOLDER holds optim_cuda.jsonl and optim_gpt2.jsonl and is written to: benchmarks/results unless it
# is given. Repeat a stage until it no longer says "call it again". The texts come first, on any
# machine (benchmarks/optimisers/linux_texts.py): benchmarks/texts/linux_c.xz and linux_rst.xz.
#
# Seconds are estimates for an H200 from before steps were CUDA graphs: 22 ms for a step of Muon at 25M
# parameters, 33 with score (measured), 65 with SOAP (estimated), and 7.5 s for a run of 400 steps
# where eight run at a time (measured for Muon: 60 s each). As graphs the first two take 15 and 18.5 ms
# (measured), so 7.5 s may be enough for one at a time, with its compilation in another worker.
# Nothing of this script was run on a GPU yet.
#
#     stage     what                                                   runs   seconds   calls
#     check       two steps of every rule on the CPU, to see that it works    -      60     1
#     pace        time and memory of 10 rules, one at a time                 10     250     1
#     short       tuning (12 runs each) and 3 seeds, 400 steps, C           150   1,150     3
#     time        the same lengths of time, 3 seeds, 400 steps, C            27     210     1
#     prose       the same settings on documentation, 3 seeds                30     230     1
#     long        tuning (3 more each) and 3 seeds, 2,000 steps, C           60   2,100     4
#     long-time   the same lengths of time                                   27   1,000     2
#     pace85      time and memory of 4 rules at 85M, one at a time            4     160     1
#     large       tuning (3 more each) and 2 seeds, 85M, 1,000 steps, C      20   1,300     3
#     large-time  the same lengths of time                                    6     400     1
#
# "large" has the four rules of LARGE; put the strongest two of "long" there.
# All of it is about two hours of one GPU; "pace", "short" and "time" are the first half-hour.
set -eu
stage=$1 folder=${2:-benchmarks/results} commit=${3:-}
workers=${WORKERS:-8}

bench() {
    size=$1
    shift
    python -m fenchel bench optim --size "$size" --out "$folder" --minutes 8.5 \
        ${commit:+--commit "$commit"} "$@"
}

rules() { # the options --rule of a list, one rule per line
    bench_size=$1 list=$2
    shift 2
    while IFS= read -r rule; do
        [ -z "$rule" ] || set -- "$@" --rule "$rule"
    done <<LIST
$list
LIST
    bench "$bench_size" "$@"
}

RULES="muon + qk-norm
adamw + qk-norm
muon
muonh + qk-norm
normuon + qk-norm
soap + qk-norm
score on muon
score on muonh
score on normuon
score on soap"
LARGE="muon + qk-norm
muonh + qk-norm
score on muon
score on muonh"

C="--text linux_c"
if [ "$workers" -gt 1 ] && command -v nvidia-cuda-mps-control >/dev/null; then
    nvidia-cuda-mps-control -d 2>/dev/null || true
fi
# shellcheck disable=SC2086  # C is two words
case $stage in
check) python -m fenchel bench optim --quick --study pace --study contest --out "$folder/check" ;;
pace) rules cuda "$RULES" --study pace ;;
short) rules cuda "$RULES" --study contest $C --steps 400 --by steps --workers "$workers" ;;
time) rules cuda "$RULES" --study contest $C --steps 400 --by time --workers "$workers" ;;
prose) rules cuda "$RULES" --study contest --text linux_rst --by steps --workers "$workers" ;;
long) rules cuda "$RULES" --study contest $C --steps 2000 --by steps --workers "$workers" ;;
long-time) rules cuda "$RULES" --study contest $C --steps 2000 --by time --workers "$workers" ;;
pace85) rules gpt2 "$LARGE" --study pace ;;
large) rules gpt2 "$LARGE" --study contest --by steps --workers "${WORKERS:-4}" ;;
large-time) rules gpt2 "$LARGE" --study contest --by time --workers "${WORKERS:-4}" ;;
*)
    echo "no stage $stage; the stages are at the top of this script" >&2
    exit 2
    ;;
esac
