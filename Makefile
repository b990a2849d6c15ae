# Every target sets up .venv by itself when it is missing or older than what it is made from.
VENV := .venv
PY := $(VENV)/bin/python

# gpu-report alone uses a Python of yours, which has torch already.
PYTHON ?= python3
MINUTES ?= 8

.PHONY: help demo test test-next test-newest test-oldest test-te test-gpu gpu-report lint bench docs clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /  make \1\t/p' Makefile | expand -t 18

demo: $(VENV)/.ready  ## train under `anchor` and `full` on real text, on this machine's CPU
	$(PY) examples/cpu_demo/run.py

test: $(VENV)/.ready  ## every test that runs without a GPU
	$(PY) -m pytest -n logical --maxprocesses 8 --dist loadfile

test-next: $(VENV)/.ready  ## tests of the border to Megatron against a checkout: MEGATRON=path
	tools/test_next.sh $(VENV) "$(MEGATRON)"

test-newest: .venv-newest/.ready  ## the unit tests with the newest of everything, on Python 3.13
	.venv-newest/bin/python -m pytest -n logical --maxprocesses 8 --dist loadfile tests/unit

test-oldest: .venv-oldest/.ready  ## the unit tests with the oldest of everything that setup.py promises
	.venv-oldest/bin/python -m pytest -n logical --maxprocesses 8 --dist loadfile tests/unit

test-te: .venv-te/.ready  ## Transformer Engine's own Python code, without a GPU
	.venv-te/bin/python -m pytest $(wildcard tests/*/test_te_contract*.py)

test-gpu: $(VENV)/.ready  ## kernels and training on one GPU
	$(PY) -m pytest tests/gpu

gpu-report:  ## kernels, training steps and speed on your GPU, in MINUTES=8, by PYTHON=python3
	$(PYTHON) benchmarks/gpu_report.py --minutes $(MINUTES)

lint: $(VENV)/.ready  ## format and type checks
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: $(VENV)/.ready  ## side by side with the peers; writes docs/measurements/DATE-cpu.md
	$(PY) benchmarks/run_all.py

docs: .venv-docs/.ready  ## the site, into site/ (--quiet would let broken links pass)
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build

clean:  ## remove the environment and what the demo wrote
	rm -rf $(VENV) .venv-te .venv-docs .venv-newest .venv-oldest demo_output site

$(VENV)/.ready: setup.py requirements/constraints.txt tools/make_venv.sh tools/venv_aside.sh
	tools/make_venv.sh $(VENV)

.venv-docs/.ready: requirements/docs.txt requirements/constraints.txt tools/make_venv.sh
	tools/make_venv.sh .venv-docs -r requirements/docs.txt

.venv-newest/.ready: setup.py tools/make_venv.sh tools/venv_aside.sh
	CONSTRAINTS=/dev/null PYTHON=$${PYTHON:-3.13} tools/make_venv.sh .venv-newest

.venv-oldest/.ready: setup.py tools/make_venv.sh tools/venv_aside.sh requirements/lower_bounds.py
	python3 requirements/lower_bounds.py >requirements/oldest.txt
	CONSTRAINTS=requirements/oldest.txt tools/make_venv.sh .venv-oldest

.venv-te/.ready: $(VENV)/.ready requirements/te.txt tools/make_venv_te.sh
	tools/make_venv_te.sh $(VENV) .venv-te
