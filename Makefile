# Two commands: `make demo` shows what this does, `make test` checks it. Both set themselves up.
#
#     make test TORCH=2.15.0 TRANSFORMERS=5.23.0 TRITON=3.9.0
#
# takes other versions, any of them, in an environment of its own; so does every target below.

# bf16 matrix products die with an illegal instruction on CPUs whose AMX is masked, unless this is
# set before torch loads. `openmla doctor` tells whether a machine needs it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

PYTHON ?= python3
# Processes of `make test`.
JOBS ?= 2
space := $(subst ,, )
VERSIONS := $(strip $(if $(TORCH),--torch $(TORCH)) \
	$(if $(TRANSFORMERS),--transformers $(TRANSFORMERS)) $(if $(TRITON),--triton $(TRITON)))
NAMES := $(if $(TORCH),torch$(TORCH)) $(if $(TRANSFORMERS),transformers$(TRANSFORMERS)) \
	$(if $(TRITON),triton$(TRITON))
VENV := $(subst $(space),-,$(strip .venv $(NAMES)))
BIN := $(VENV)/bin
# Several tests at a time, each with one thread: torch's threads gain nothing at these sizes.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

# What every op, plan and cache means, by the reference; and what masks mean to attach().
FAST := tests/attention tests/cache tests/config tests/ops tests/plan tests/test_house.py \
	tests/test_readme.py tests/integrations/test_masks.py

.PHONY: demo test test-fast test-all test-parallel lint mutants table setup clean test-gpu bench-gpu \
	demo-vllm test-vllm test-vllm-all test-vllm-gpu setup-vllm docs

demo: setup
	@$(BIN)/openmla doctor
	@echo
	@$(BIN)/openmla generate --model demo --compare
	@echo
	@echo "More of it: $(BIN)/openmla generate --model demo --attention sparse --compare"
	@echo "            $(BIN)/openmla eval --model demo"

# What every commit passes. test-fast is for the inner loop, test-all has everything.
test: lint
	$(PYTEST) -m "not slow"

test-fast: setup
	$(PYTEST) -m "not slow" $(FAST)

test-all: lint
	$(PYTEST)

# Over ranks, of gloo groups: also 3, 4 and 8 of them, all lengths and interleaves.
test-parallel: setup
	$(PYTEST) tests/parallel

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One request to vLLM's server by openmla, and to one by vLLM's own backend.
demo-vllm: setup-vllm
	@.venv-vllm/bin/python -m tools.demo_vllm

# The real engine, in an environment of its own: the main cases in a quarter of an hour, then the
# whole matrix, load, speed and the server.
test-vllm: setup-vllm
	@.venv-vllm/bin/python -m tests.vllm
	@.venv-vllm/bin/python -m tests.vllm.v4

test-vllm-all: setup-vllm
	@.venv-vllm/bin/python -m tests.vllm --all
	@.venv-vllm/bin/python -m tests.vllm.v4 --all

# The same engine on a GPU, with the python3 that has vLLM; nothing is installed.
test-vllm-gpu:
	$(PYTHON) -m tests.vllm.gpu --speed --load

# On a machine with a GPU, with its own python3, torch and Triton; nothing is installed. Both go on
# where they were cut.
test-gpu:
	$(PYTHON) tools/gpu_tests.py

bench-gpu:
	mkdir -p .gpu-bench
	for what in latent indexer routes sparse_step mha compile; do \
		$(PYTHON) -m bench.$$what --json .gpu-bench/$$what.json || exit 1; \
	done

# Puts deliberate bugs into a copy of the package and shows which test catches each.
mutants: setup
	$(BIN)/python tools/mutants.py

# Writes what pages have from the code and from bench/results/ anew: tables, plots.
table: setup
	$(BIN)/python -m tools.support_table

# The site, into site/; an unknown link or a page that nothing leads to fails.
docs:
	@$(PYTHON) -m tools.setup_docs
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "open site/index.html"

setup:
	@$(PYTHON) tools/setup_env.py $(VERSIONS)

setup-vllm:
	@$(PYTHON) -m tools.setup_vllm

clean:
	rm -rf site .venv .venv-* .vllm-tests .pytest_cache .mypy_cache .ruff_cache .hypothesis
