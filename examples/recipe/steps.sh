# shellcheck shell=bash disable=SC2154,SC2153  # run.sh sets the variables
# The steps of a recipe, one function each, in their order. Each can be run again.

step_shrink() { # TOY only
    need "$HF_MODEL/config.json" "HF_MODEL names the folder of a Hugging Face model"
    if [[ -e $MODEL/config.json ]]; then
        echo "$MODEL is there"
        return
    fi
    run "$PYTHON" "$ROOT/examples/recipe/shrink_model.py" "$HF_MODEL" "$MODEL"
}

step_convert() {
    need "$MODEL/config.json" "HF_MODEL names the folder of a Hugging Face model"
    if [[ -e $START/latest_checkpointed_iteration.txt ]]; then
        echo "$START is there"
        return
    fi
    run "$PYTHON" "$ROOT/tools/convert_hf_to_megatron.py" --hf "$MODEL" --out "$START" \
        --extend-to "$EXTEND_TO" --target-impl "$LAYER_IMPL"
    run "$PYTHON" "$ROOT/tools/verify_conversion.py" --megatron "$START" --hf "$MODEL" \
        --extended --no-logits
}

step_preprocess() { # a finished corpus is checked and kept
    local inputs domains=()
    read -r -a inputs <<<"$TEXTS" # patterns stay patterns: the tool finds the files
    [[ -z $DOMAIN_KEY ]] || domains=(--domain-key "$DOMAIN_KEY")
    run "$PYTHON" "$ROOT/tools/preprocess_data.py" --input "${inputs[@]}" "${domains[@]}" \
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

step_train() { # goes on where the last checkpoint of $RUN stands
    local model=() layout=() documents=() extra=() nodes=(--standalone)
    need "$START/megatron_args.txt" "run the step convert first"
    need "$DATA.idx" "run the step preprocess first"
    if [[ -e $RUN/latest_checkpointed_iteration.txt ]] &&
        (($(<"$RUN/latest_checkpointed_iteration.txt") >= TRAIN_ITERS)); then
        echo "$RUN has iteration $TRAIN_ITERS"
        return
    fi
    if [[ -e $START/megatron_args.txt ]]; then
        read -r -d '' -a model <"$START/megatron_args.txt" || true # to the end of the file
    else
        model=("@$START/megatron_args.txt") # DRY_RUN before the conversion
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
    read -r -a extra <<<"$EXTRA_ARGS"
    ((NNODES == 1)) || nodes=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")

    export CUDA_DEVICE_MAX_CONNECTIONS=1 # Megatron overlaps communication only so
    export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
    run "$PYTHON" -m torch.distributed.run --nproc-per-node "$GPUS_PER_NODE" "${nodes[@]}" \
        "${ON_CPU[@]}" -m megatron_anchor.pretrain_gpt \
        "${model[@]}" "${ROPE_ARGS[@]}" "${layout[@]}" "${PATTERN_ARGS[@]}" "${documents[@]}" \
        --seq-length "$SEQ_LENGTH" --train-iters "$TRAIN_ITERS" \
        --micro-batch-size 1 --global-batch-size "$GLOBAL_BATCH_SIZE" --calculate-per-token-loss \
        --optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 \
        --lr "$LEARNING_RATE" --lr-decay-style constant --seed 42 \
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
        --data-path "$DATA" --split 100,0,0 --eval-iters 0 --eval-interval 1000000 \
        --data-cache-path "$WORK/cache" \
        --pretrained-checkpoint "$START" --load "$RUN" --save "$RUN" --ckpt-format torch_dist \
        --save-interval "$SAVE_INTERVAL" \
        --save-last "$SAVE_LAST" --save-last-every "$SAVE_LAST_EVERY" \
        --log-interval 1 --log-throughput --tensorboard-dir "$RUN/tensorboard" "${extra[@]}"
}

step_export() {
    need "$LAST" "run the step train to its end, or set TRAIN_ITERS to a checkpoint that is there"
    if [[ -e $EXPORT/config.json ]]; then
        echo "$EXPORT is there"
        return
    fi
    run "$PYTHON" "$ROOT/tools/convert_megatron_to_hf.py" --megatron "$LAST" \
        --out "$EXPORT" --like "$MODEL"
}

step_verify() { # bits and logits of the export, on the CPU
    local more
    need "$EXPORT/config.json" "run the step export first"
    read -r -a more <<<"$VERIFY_ARGS"
    run "$PYTHON" "$ROOT/tools/verify_conversion.py" --megatron "$LAST" --hf "$EXPORT" "${more[@]}"
}

step_evaluate() { # the mean over the last checkpoints: single ones scatter (the paper's Figure 4)
    local iteration folder lengths more checkpoints=() perplexity=()
    for ((iteration = TRAIN_ITERS - (SAVE_LAST - 1) * SAVE_LAST_EVERY; iteration <= TRAIN_ITERS; \
        iteration += SAVE_LAST_EVERY)); do
        printf -v folder '%s/iter_%07d' "$RUN" "$iteration"
        need "$folder" "train with SAVE_LAST=$SAVE_LAST SAVE_LAST_EVERY=$SAVE_LAST_EVERY"
        checkpoints+=("$folder")
    done
    read -r -a lengths <<<"${RULER_LENGTHS//$'\n'/ }"
    read -r -a more <<<"$EVALUATE_ARGS"
    [[ -z $PERPLEXITY_TEXT ]] || perplexity=(--perplexity --text "$PERPLEXITY_TEXT")
    run "$PYTHON" "$ROOT/tools/evaluate_long_context.py" --checkpoints "${checkpoints[@]}" \
        --tasks "$RULER_TASKS" --seq-lengths "${lengths[@]}" --num-samples "$NUM_SAMPLES" --seed 42 \
        --first-token "$ANCHOR_TOKEN" --batch-size 1 --output-dir "$WORK/results/$ARM" \
        "${perplexity[@]}" \
        "${more[@]}"
}
