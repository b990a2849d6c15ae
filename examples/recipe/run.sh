# shellcheck shell=bash
# What all recipes share: settings, arms, and the loop over the steps. A recipe sets its figures,
# reads this file and calls run_steps.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

fail() {
    echo "error: $*" >&2
    exit 1
}

expect() { # expect VARIABLE VALUE...: the variable has one of these values
    local name=$1 value=${!1}
    shift
    [[ " $* " == *" $value "* ]] || fail "$name=$value: expected one of: $*"
}

whole() { # whole LEAST VARIABLE...: each is a whole number, LEAST or more
    local least=$1 name
    shift
    for name in "$@"; do
        [[ ${!name} =~ ^(0|[1-9][0-9]{0,17})$ ]] && ((${!name} >= least)) ||
            fail "$name=${!name}: expected a whole number, $least or more"
    done
}

switch() { # switch VARIABLE...: 1 is on; 0 and nothing are off, which the scripts test as empty
    local name
    for name in "$@"; do
        case ${!name:=} in
            1) ;;
            0 | '') printf -v "$name" '' ;;
            *) fail "$name=${!name}: expected 1 or 0" ;;
        esac
    done
}

need() { # need PATH WHAT: the path is there
    [[ -n $DRY_RUN || -e $1 ]] || fail "$1 does not exist: $2"
}

run() { # show a command and run it
    printf '%q ' "$@"
    echo
    [[ -n $DRY_RUN ]] || "$@"
}

run_forwarding() { # as run; the command gets a SIGTERM that this shell gets, once
    local job='' status=0 asked='' interrupted=''
    printf '%q ' "$@"
    echo
    [[ -z $DRY_RUN ]] || return 0
    trap 'interrupted=1 asked=${asked:-1}; forward_once' TERM
    trap 'interrupted=1' INT # torchrun has it too, and ends its ranks
    "$@" &
    job=$!
    forward_once
    while true; do # a signal ends the wait, and not the command
        interrupted='' status=0
        wait "$job" || status=$?
        [[ -n $interrupted ]] || break
    done
    trap - TERM INT
    return "$status"
}

forward_once() { # for run_forwarding
    [[ $asked == 1 && -n $job ]] || return 0
    asked=done
    kill -TERM "$job" 2>/dev/null || true # it ended just now
}

words_of() { # words_of SETTING: its words into WORDS, quoted as in a shell; nothing in it is run
    WORDS=()
    [[ -n ${!1} ]] || return 0
    mapfile -d '' -t WORDS < <("$PYTHON" "$ROOT/examples/recipe/words.py" "${!1}")
    wait "$!" || fail "$1=$(printf %q "${!1}") cannot be read as words"
}

in_a_setting() { # in_a_setting FLAG: whether other steps read what it says from a setting
    local setting
    case $1 in
        --save | --load | --pretrained-checkpoint) setting=RUN ;;
        --train-samples) setting=TRAIN_ITERS ;;
        --seq-length | --global-batch-size | --save-last | --save-last-every)
            setting=${1#--} && setting=${setting//-/_} && setting=${setting^^} ;;
        --attention-pattern) setting=ATTENTION ;;
        --domain-tags) setting=DOMAIN_TAGS ;;
        --interleave-chunks) setting=INTERLEAVE ;;
        --loss-weighting) setting=LOSS_WEIGHTING ;;
        --document-length-schedule) setting=GROW_FROM ;;
        --document-list) setting=UPSAMPLE ;;
        --data-path) setting=CORPUS ;;
        --pretrained-checkpoint) setting=TUNE_FROM ;;
        --rotary-base) setting=ROPE_BASE ;;
        --rope-parameters) setting=ROPE_SCALING ;;
        --recompute-granularity) setting=RECOMPUTE ;;
        --tensor-model-parallel-size) setting=TP ;;
        --pipeline-model-parallel-size) setting=PP ;;
        --context-parallel-size) setting=CP ;;
        *) return 0 ;;
    esac
    fail "EXTRA_ARGS has $1: set $setting, which other steps read, too"
}

given() { # given VARIABLE: it came from the environment, not from the recipe
    [[ $(declare -p "$1" 2>/dev/null) =~ ^declare\ -[[:alpha:]]*x ]]
}

toy() { # toy VARIABLE VALUE: a small value, where none was given
    given "$1" || printf -v "$1" %s "$2"
}

iteration_of() { # iteration_of RUN: what its tracker says, nothing without one
    local tracker=$1/latest_checkpointed_iteration.txt text
    [[ -e $tracker ]] || return 0
    read -r -d '' text <"$tracker" || true # all of it, without the space around it
    [[ $text =~ ^[0-9]{1,18}$ ]] ||
        fail "$tracker holds $(printf %q "${text:0:60}"), expected the number of an iteration"
    echo $((10#$text))
}

# --- settings -----------------------------------------------------------------------------------
switch DRY_RUN TOY SAVE_ON_TERM
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=$ROOT/.venv/bin/python
    [[ -x $PYTHON ]] || PYTHON=python
fi
EXTRA_ARGS=${EXTRA_ARGS:-} VERIFY_ARGS=${VERIFY_ARGS:-} EVALUATE_ARGS=${EVALUATE_ARGS:-}
words_of EXTRA_ARGS
EXTRA=("${WORDS[@]}")
unset EXTRA_ITERS
for ((i = 0; i < ${#EXTRA[@]}; i++)); do # what other steps must know, too
    case ${EXTRA[i]} in
        --train-iters) EXTRA_ITERS=${EXTRA[i + 1]:-} ;;
        --train-iters=*) EXTRA_ITERS=${EXTRA[i]#*=} ;;
        --*) in_a_setting "${EXTRA[i]%%=*}" ;;
    esac
done
TRAIN_ITERS=${EXTRA_ITERS-$TRAIN_ITERS}
whole 1 ORIGINAL_LENGTH SEQ_LENGTH ROPE_BASE TRAIN_ITERS GLOBAL_BATCH_SIZE TP PP CP
WORK=${WORK:-work/$NAME${TOY:+-toy}}
TEXTS=${TEXTS:-data/*.jsonl}
DOMAIN_KEY=${DOMAIN_KEY-meta.redpajama_set_name} # SlimPajama's
GPU=${GPU:-A100-80GB} GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
SAVE_INTERVAL=${SAVE_INTERVAL:-500} SAVE_LAST=${SAVE_LAST:-5} SAVE_LAST_EVERY=${SAVE_LAST_EVERY:-10}
whole 1 GPUS_PER_NODE NNODES SAVE_INTERVAL SAVE_LAST SAVE_LAST_EVERY
whole 0 NODE_RANK
RULER_LENGTHS=${RULER_LENGTHS:-$(for ((n = 4096; n <= SEQ_LENGTH; n *= 2)); do echo -n "$n "; done)}
RULER_TASKS=${RULER_TASKS:-ruler} NUM_SAMPLES=${NUM_SAMPLES:-100}
PERPLEXITY_TEXT=${PERPLEXITY_TEXT:-}

# --- arms ---------------------------------------------------------------------------------------
ATTENTION=${ATTENTION:-anchor} MIXTURE=${MIXTURE:-}
switch DOMAIN_TAGS INTERLEAVE UPSAMPLE
ROPE_SCALING=${ROPE_SCALING:-none}
LOSS_WEIGHTING=${LOSS_WEIGHTING:-uniform} GROW_FROM=${GROW_FROM:-}
CHAT=${CHAT:-} CHAT_TEMPLATE=${CHAT_TEMPLATE:-} TUNE_FROM=${TUNE_FROM:-}
[[ -z $CHAT || -z $DOMAIN_TAGS$UPSAMPLE$MIXTURE ]] ||
    fail "CHAT=$CHAT: conversations have no domains; leave out DOMAIN_TAGS, UPSAMPLE and MIXTURE"
[[ -n $CHAT || -z $CHAT_TEMPLATE ]] || fail "CHAT_TEMPLATE=$CHAT_TEMPLATE: only CHAT reads it"
expect LOSS_WEIGHTING uniform document-mean document-sqrt effective-context
[[ -z $GROW_FROM ]] || whole 2 GROW_FROM
expect ATTENTION anchor intra-document intra-document-reset full anchor-masked
expect ROPE_SCALING none ntk yarn
expect RECOMPUTE none mlp full
[[ -z $MIXTURE || -n $UPSAMPLE ]] || fail "MIXTURE=$MIXTURE: only UPSAMPLE=1 draws documents by it"
[[ -z $DOMAIN_TAGS$MIXTURE || -n $DOMAIN_KEY ]] ||
    fail "DOMAIN_KEY is empty: DOMAIN_TAGS and MIXTURE need the field that names a row's domain"
[[ $ROPE_SCALING == none ]] || ((SEQ_LENGTH > ORIGINAL_LENGTH)) ||
    fail "SEQ_LENGTH=$SEQ_LENGTH: ROPE_SCALING=$ROPE_SCALING is for more than $ORIGINAL_LENGTH"

ARM=$SEQ_LENGTH-$ATTENTION${DOMAIN_TAGS:+-tags}${INTERLEAVE:+-interleaved}${UPSAMPLE:+-upsampled}
ARM+=${MIXTURE:+-${MIXTURE//[^[:alnum:].=_-]/-}} # its commas, too
ARM+=-rope$ROPE_BASE
[[ $ROPE_SCALING == none ]] || ARM+=-$ROPE_SCALING
[[ $LOSS_WEIGHTING == uniform ]] || ARM+=-$LOSS_WEIGHTING
ARM+=${GROW_FROM:+-from$GROW_FROM}${CHAT:+-answers}

PATTERN_ARGS=(--attention-pattern "$ATTENTION" --anchor-token "$ANCHOR_TOKEN")
[[ -z $DOMAIN_TAGS ]] || PATTERN_ARGS+=(--domain-tags)
[[ -z $INTERLEAVE ]] || PATTERN_ARGS+=(--interleave-chunks)
[[ -z $CHAT ]] || PATTERN_ARGS+=(--packing best-fit) # no conversation is cut that fits
[[ $LOSS_WEIGHTING == uniform ]] || PATTERN_ARGS+=(--loss-weighting "$LOSS_WEIGHTING")

rope_args() { # by how much the context grows decides over NTK and YaRN
    local factor base=$ROPE_BASE head_dim=128 yarn
    factor=$(LC_ALL=C awk "BEGIN { printf \"%.12g\", $SEQ_LENGTH / $ORIGINAL_LENGTH }")
    [[ $factor == *.* ]] || factor+=.0
    if [[ $ROPE_SCALING == ntk ]]; then
        # Hugging Face's "dynamic" would change nothing up to max_position_embeddings.
        base=$(LC_ALL=C awk "BEGIN { printf \"%.0f\", $base * $factor ^ ($head_dim / ($head_dim - 2)) }")
    fi
    ROPE_ARGS=(--rotary-base "$base")
    if [[ $ROPE_SCALING == yarn ]]; then
        yarn="{\"rope_type\":\"yarn\",\"factor\":$factor"
        yarn+=",\"original_max_position_embeddings\":$ORIGINAL_LENGTH}"
        ROPE_ARGS+=(--rope-parameters "$yarn")
    fi
}
rope_args

# --- TOY=1: everything on the CPU, with a small model of the same kind and few short samples -----
MODEL=$HF_MODEL EXTEND_TO=$SEQ_LENGTH LAYER_IMPL=transformer_engine ON_CPU=()
STEPS=(convert preprocess plan train export verify evaluate)
[[ -z $UPSAMPLE ]] || STEPS=(convert preprocess upsample plan train export verify evaluate)
if [[ -n $TOY ]]; then # what is set stays
    STEPS=(shrink "${STEPS[@]}")
    MODEL=$WORK/tiny LAYER_IMPL=local
    ON_CPU=(-m megatron_anchor.on_cpu)
    ((NNODES == 1)) || fail "NNODES=$NNODES: TOY=1 runs in one place; leave NNODES out"
    toy CORPUS "$WORK/corpus"
    toy TP $((TP < 2 ? TP : 2)) && toy CP $((CP < 2 ? CP : 2)) && toy PP $((PP < 2 ? PP : 2))
    toy GPUS_PER_NODE $((TP * PP * CP))
    toy SEQ_LENGTH 512
    toy GLOBAL_BATCH_SIZE 2
    [[ -n ${EXTRA_ITERS:-} ]] || toy TRAIN_ITERS 3
    toy SAVE_INTERVAL 3
    toy SAVE_LAST $((TRAIN_ITERS < 2 ? TRAIN_ITERS : 2))
    toy SAVE_LAST_EVERY 1
    toy RULER_TASKS niah_single_1 && toy RULER_LENGTHS 1024 && toy NUM_SAMPLES 1
    export OMP_NUM_THREADS=1
fi
((TRAIN_ITERS > (SAVE_LAST - 1) * SAVE_LAST_EVERY)) ||
    fail "TRAIN_ITERS=$TRAIN_ITERS has no room for the last SAVE_LAST=$SAVE_LAST checkpoints," \
        "SAVE_LAST_EVERY=$SAVE_LAST_EVERY steps apart: lower one of these"

START=$WORK/$EXTEND_TO-start # the converted checkpoint
place=$(realpath -ms -- "$START") # the converter writes it into a file of flags
[[ $place != *[][:space:]*?[]* ]] ||
    fail "WORK=$WORK: the folder $(printf %q "$place") has a space or a wildcard: set WORK to another"
RUN=${RUN:-$WORK/$ARM}       # what is trained
printf -v LAST '%s/iter_%07d' "$RUN" "$TRAIN_ITERS"
EXPORT=${EXPORT:-$WORK/$ARM-hf-$TRAIN_ITERS}
DATA=${CORPUS}_text_document # as tools/preprocess_data.py names it
[[ -z $CHAT ]] || DATA=$CORPUS-chat_messages_document
GPUS=$((GPUS_PER_NODE * NNODES))
if [[ -n $GROW_FROM ]]; then # documents have their whole length in the second half
    ((GROW_FROM < SEQ_LENGTH)) || fail "GROW_FROM=$GROW_FROM: expected less than SEQ_LENGTH=$SEQ_LENGTH"
    PATTERN_ARGS+=(--document-length-schedule
        "linear:$GROW_FROM:$SEQ_LENGTH:$(((TRAIN_ITERS * GLOBAL_BATCH_SIZE + 1) / 2))")
fi
TOKENS=$((TRAIN_ITERS * GLOBAL_BATCH_SIZE * SEQ_LENGTH))
LIST=$WORK/$EXTEND_TO${MIXTURE:+-${MIXTURE//[^[:alnum:].=_-]/-}}-$TOKENS-long_documents.npy

# shellcheck source-path=SCRIPTDIR source=steps.sh
source "$ROOT/examples/recipe/steps.sh"

usage() {
    cat <<USAGE
usage: [SETTING=VALUE ...] $0 [STEP ...]

steps, in this order (default: all): ${STEPS[*]}
  finished ones are skipped, training goes on from its last checkpoint
settings, with the values that they have now:
  HF_MODEL=$HF_MODEL  TEXTS=$TEXTS  DOMAIN_KEY=$DOMAIN_KEY
  CORPUS=$CORPUS  WORK=$WORK  RUN=$RUN  EXPORT=$EXPORT  PYTHON=$PYTHON
  TP=$TP PP=$PP CP=$CP RECOMPUTE=$RECOMPUTE  GPU=$GPU GPUS_PER_NODE=$GPUS_PER_NODE NNODES=$NNODES
  SEQ_LENGTH=$SEQ_LENGTH TRAIN_ITERS=$TRAIN_ITERS GLOBAL_BATCH_SIZE=$GLOBAL_BATCH_SIZE LEARNING_RATE=$LEARNING_RATE
  SAVE_INTERVAL=$SAVE_INTERVAL SAVE_LAST=$SAVE_LAST SAVE_LAST_EVERY=$SAVE_LAST_EVERY
  RULER_LENGTHS="${RULER_LENGTHS//$'\n'/ }" RULER_TASKS=$RULER_TASKS
  NUM_SAMPLES=$NUM_SAMPLES PERPLEXITY_TEXT=$PERPLEXITY_TEXT
  SAVE_ON_TERM=$SAVE_ON_TERM   1: training saves and stops when SIGTERM comes, and the script ends with 75
  EXTRA_ARGS="$EXTRA_ARGS"   more arguments for training; they win over the recipe's, and what
                  has a setting here is refused but for --train-iters
  VERIFY_ARGS="$VERIFY_ARGS"  e.g. --no-logits, where memory is short of two models in float32
  EVALUATE_ARGS="$EVALUATE_ARGS"  e.g. --qa-file questions.json --tasks ruler
arms:
  ATTENTION=$ATTENTION       anchor, intra-document, intra-document-reset, full or anchor-masked
  DOMAIN_TAGS=$DOMAIN_TAGS INTERLEAVE=$INTERLEAVE UPSAMPLE=$UPSAMPLE     1 switches on; MIXTURE=NAME=SHARE,...
  ROPE_BASE=$ROPE_BASE ROPE_SCALING=$ROPE_SCALING   none, ntk or yarn
  LOSS_WEIGHTING=$LOSS_WEIGHTING   uniform, document-mean, document-sqrt or effective-context
  CHAT=$CHAT   conversations (.jsonl with messages): only answers are learned, in samples of whole
                  conversations; CHAT_TEMPLATE=$CHAT_TEMPLATE   with generation tags, if the tokenizer's has none
  TUNE_FROM=$TUNE_FROM   a trained arm to begin with, such as the extended model; default: the conversion
  GROW_FROM=$GROW_FROM   slots that documents are bounded to at first, growing until half of the training
Texts of several words (TEXTS, EXTRA_ARGS, ...) are read with quotes as in a shell.
DRY_RUN=1 prints the commands; TOY=1 runs them all on a CPU with a tiny model and short samples,
which the settings above change, too.
Cluster: sbatch --nodes 2 examples/slurm.sh $0 [STEP ...]; more: docs/recipes.md
USAGE
}

run_steps() {
    local step known=" shrink convert preprocess upsample plan train export verify evaluate "
    if [[ ${1:-} == --help || ${1:-} == -h ]]; then
        usage
        return
    fi
    if [[ ${1:-} == --steps ]]; then
        printf '%s\n' "${STEPS[@]}"
        return
    fi
    [[ $# -gt 0 ]] || set -- "${STEPS[@]}"
    for step in "$@"; do
        [[ $known == *" $step "* ]] || fail "unknown step $step: expected some of:$known"
    done
    for step in "$@"; do
        echo "== $NAME: $step"
        "step_$step"
    done
}
