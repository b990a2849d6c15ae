# shellcheck shell=bash disable=SC2154,SC2153  # run.sh sets the variables
# The steps of a recipe, one function each, in their order. Each can be run again.

UNFINISHED=75 # status of a training that was asked to stop, and goes on when it is started again

alone() { # alone PATH: no other job of this script writes it, until this process ends
    local status=0
    [[ -z $DRY_RUN ]] || return 0
    mkdir -p "$(dirname "$1")"
    exec {LOCK}<>"$1.step.lock" # the file is kept: removing it would let two jobs lock two files
    "$PYTHON" "$ROOT/examples/recipe/lock.py" "$LOCK" "$1" || status=$?
    ((status == 0)) || exit "$status"
}

step_shrink() { # TOY only
    need "$HF_MODEL/config.json" "HF_MODEL names the folder of a Hugging Face model"
    if [[ -e $MODEL/config.json ]]; then
        echo "$MODEL is there"
        return
    fi
    alone "$MODEL"
    run "$PYTHON" "$ROOT/examples/recipe/shrink_model.py" "$HF_MODEL" "$MODEL"
}

step_convert() {
    need "$MODEL/config.json" "HF_MODEL names the folder of a Hugging Face model"
    if [[ -e $START/latest_checkpointed_iteration.txt ]]; then
        echo "$START is there"
        return
    fi
    alone "$START"
    run "$PYTHON" "$ROOT/tools/convert_hf_to_megatron.py" --hf "$MODEL" --out "$START" \
        --extend-to "$EXTEND_TO" --target-impl "$LAYER_IMPL"
    run "$PYTHON" "$ROOT/tools/verify_conversion.py" --megatron "$START" --hf "$MODEL" \
        --extended --no-logits
}

step_preprocess() { # a finished corpus is checked and kept
    local domains=()
    alone "$DATA"
    if [[ -n $CHAT ]]; then
        local template=()
        words_of CHAT
        [[ -z $CHAT_TEMPLATE ]] || template=(--chat-template "$CHAT_TEMPLATE")
        run "$PYTHON" "$ROOT/tools/preprocess_data.py" --chat --input "${WORDS[@]}" \
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" "${template[@]}" \
            --output-prefix "$CORPUS-chat" --resume
        return
    fi
    words_of TEXTS # patterns stay patterns: the tool finds the files
    [[ -z $DOMAIN_KEY ]] || domains=(--domain-key "$DOMAIN_KEY")
    run "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "${WORDS[@]}" "${domains[@]}" \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$MODEL" --append-eod \
        --output-prefix "$CORPUS" --resume
}

step_upsample() {
    local mixture=()
    [[ -z $MIXTURE ]] || mixture=(--mixture "$MIXTURE")
    need "$DATA.idx" "run the step preprocess first"
    if [[ -e $LIST ]]; then
        echo "$LIST is there"
        return
    fi
    alone "$LIST"
    run "$PYTHON" "$ROOT/tools/upsample_long_documents.py" "$DATA" --output "$LIST" \
        --tokens "$TOKENS" "${mixture[@]}"
}

step_plan() { # stops here where the layout does not fit
    local pattern=${ATTENTION/anchor-masked/anchor} # the control has the work of anchor
    need "$DATA.idx" "run the step preprocess first"
    run "$PYTHON" "$ROOT/tools/plan_training.py" --model "$MODEL" --corpus "$DATA" \
        --gpu "$GPU" --gpus "$GPUS" --seq-length "$SEQ_LENGTH" \
        --global-batch-size "$GLOBAL_BATCH_SIZE" --train-tokens "$TOKENS" \
        --attention-pattern "$pattern" --tp "$TP" --pp "$PP" --cp "$CP"
}

model_flags() { # the lines of megatron_args.txt into MODEL_FLAGS: each is one flag with its value
    local line flag value
    MODEL_FLAGS=()
    while IFS= read -r line || [[ -n $line ]]; do
        [[ $line =~ ^(--[a-z][A-Za-z0-9_-]*)( (.*[^[:space:]]))?[[:space:]]*$ ]] ||
            fail "$1: expected a flag and its value on each line, got $(printf %q "$line")"
        flag=${BASH_REMATCH[1]} value=${BASH_REMATCH[3]}
        MODEL_FLAGS+=("$flag${value:+=$value}")
    done <"$1"
}

step_train() { # goes on where the last checkpoint of $RUN stands
    local done_before done_now launcher start=run layout=() documents=() handler=() nodes=(--standalone)
    need "$START/megatron_args.txt" "run the step convert first"
    need "$DATA.idx" "run the step preprocess first"
    done_before=$(iteration_of "$RUN")
    if ((${done_before:-0} >= TRAIN_ITERS)); then
        echo "$RUN has iteration $TRAIN_ITERS"
        return
    fi
    if [[ -e $START/megatron_args.txt ]]; then
        model_flags "$START/megatron_args.txt"
    else
        MODEL_FLAGS=("@$START/megatron_args.txt") # DRY_RUN before the conversion
    fi
    layout=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP"
        --context-parallel-size "$CP")
    ((TP == 1)) || layout+=(--sequence-parallel)
    case $RECOMPUTE in
        mlp) layout+=(--recompute-granularity selective --recompute-modules mlp) ;;
        full) layout+=(--recompute-granularity full --recompute-method uniform
            --recompute-num-layers 1) ;;
    esac
    if [[ -n $UPSAMPLE ]]; then
        need "$LIST" "run the step upsample first"
        documents=(--document-list "$LIST")
    fi
    ((NNODES == 1)) || nodes=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")

    export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron overlaps communication only so
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    [[ $NODE_RANK != 0 ]] || alone "$RUN"
    launcher=("$PYTHON" -m torch.distributed.run)
    if [[ -n $SAVE_ON_TERM ]]; then
        handler=(--exit-signal-handler)
        launcher=("$PYTHON" "$ROOT/examples/recipe/forward_term.py" "${launcher[@]}"
            --signals-to-handle SIGINT,SIGHUP,SIGQUIT)
        start=run_forwarding # Slurm may signal this shell alone
    fi
    "$start" "${launcher[@]}" --nproc-per-node "$GPUS_PER_NODE" "${nodes[@]}" \
        "${ON_CPU[@]}" -m megatron_anchor.pretrain_gpt \
        "${MODEL_FLAGS[@]}" "${ROPE_ARGS[@]}" "${layout[@]}" "${PATTERN_ARGS[@]}" "${documents[@]}" \
        --seq-length "$SEQ_LENGTH" --train-iters "$TRAIN_ITERS" \
        --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH_SIZE" --calculate-per-token-loss \
        --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
        --lr "$LEARNING_RATE" --lr-decay-style constant --seed 42 \
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
        --data-path "$DATA" --split 100,0,0 --eval-iters 0 --eval-interval 1000000 \
        --data-cache-path "$WORK/cache" \
        --pretrained-checkpoint "${TUNE_FROM:-$START}" --load "$RUN" --save "$RUN" --ckpt-format torch_dist \
        --dist-ckpt-optim-fully-reshardable --save-interval "$SAVE_INTERVAL" "${handler[@]}" \
        --save-last "$SAVE_LAST" --save-last-every "$SAVE_LAST_EVERY" \
        --log-interval 1 --log-throughput --tensorboard-dir "$RUN/tensorboard" "${EXTRA[@]}"
    [[ -z $DRY_RUN && $NODE_RANK == 0 ]] || return 0 # other nodes may see the tracker later
    done_now=$(iteration_of "$RUN")
    if ((${done_now:-0} < TRAIN_ITERS)); then
        echo "$RUN has iteration ${done_now:-0} of $TRAIN_ITERS: start this again to go on" >&2
        ((${done_now:-0} > ${done_before:-0})) || fail "no checkpoint was saved since the start"
        exit "$UNFINISHED"
    fi
}

step_export() {
    need "$LAST" "run the step train to its end, or set TRAIN_ITERS to a checkpoint that is there"
    if [[ -e $EXPORT/config.json ]]; then
        echo "$EXPORT is there"
        return
    fi
    alone "$EXPORT"
    run "$PYTHON" "$ROOT/tools/convert_megatron_to_hf.py" --megatron "$LAST" \
        --out "$EXPORT" --like "$MODEL"
}

step_verify() { # bits and logits of the export, on the CPU
    need "$EXPORT/config.json" "run the step export first"
    words_of VERIFY_ARGS
    run "$PYTHON" "$ROOT/tools/verify_conversion.py" --megatron "$LAST" --hf "$EXPORT" \
        "${WORDS[@]}"
}

step_evaluate() { # the mean over the last checkpoints: single ones scatter (the paper's Figure 4)
    local iteration folder lengths checkpoints=() perplexity=()
    for ((iteration = TRAIN_ITERS - (SAVE_LAST - 1) * SAVE_LAST_EVERY; iteration <= TRAIN_ITERS; \
        iteration += SAVE_LAST_EVERY)); do
        printf -v folder '%s/iter_%07d' "$RUN" "$iteration"
        need "$folder" "train with SAVE_LAST=$SAVE_LAST SAVE_LAST_EVERY=$SAVE_LAST_EVERY"
        checkpoints+=("$folder")
    done
    words_of RULER_LENGTHS
    lengths=("${WORDS[@]}")
    words_of EVALUATE_ARGS
    alone "$WORK/results/$ARM"
    [[ -z $PERPLEXITY_TEXT ]] || perplexity=(--perplexity --text "$PERPLEXITY_TEXT")
    run "$PYTHON" "$ROOT/tools/evaluate_long_context.py" --checkpoints "${checkpoints[@]}" \
        --tasks "$RULER_TASKS" --seq-lengths "${lengths[@]}" --num-samples "$NUM_SAMPLES" --seed 42 \
        --first-token "$ANCHOR_TOKEN" --batch-size 1 --output-dir "$WORK/results/$ARM" \
        "${perplexity[@]}" "${WORDS[@]}"
}
