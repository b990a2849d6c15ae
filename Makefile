# Every target sets up .venv by itself when it is missing or older than what it is made from.
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: demo test lint bench clean

demo: $(VENV)/.ready  ## train under `anchor` and `full` on real text, on this machine's CPU
	$(PY) examples/cpu_demo/run.py

test: $(VENV)/.ready  ## every test that runs without a GPU
	$(PY) -m pytest

lint: $(VENV)/.ready  ## format and type checks
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: $(VENV)/.ready  ## side by side with Megatron's own data path; make demo comes first
	$(PY) benchmarks/packing.py
	$(PY) benchmarks/step_time.py
	$(PY) benchmarks/preprocess.py --tokenizer-model demo_output/tokenizer --megabytes 8

clean:  ## remove the environment and what the demo wrote
	rm -rf $(VENV) demo_output

$(VENV)/.ready: setup.py requirements/constraints.txt tools/make_venv.sh
	tools/make_venv.sh $(VENV)
