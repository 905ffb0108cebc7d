# Two commands: `make demo` shows what this does, `make test` checks it. Both set themselves up.

# bf16 matrix products die with an illegal instruction on CPUs whose AMX is masked, unless this is
# set before torch loads. `openmla doctor` tells whether a machine needs it.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_BF16

PYTHON ?= python3
# Processes of `make test`.
JOBS ?= 2
BIN := .venv/bin

.PHONY: demo test lint mutants table setup clean test-gpu bench-gpu

demo: setup
	@$(BIN)/openmla doctor
	@echo
	@$(BIN)/openmla generate --model demo --compare
	@echo
	@echo "More of it: $(BIN)/openmla generate --model demo --attention sparse --compare"
	@echo "            $(BIN)/openmla eval --model demo"

# Several tests at a time, each with one thread: torch's threads gain nothing at these sizes.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# On a machine with a GPU, with its own python3, torch and Triton; nothing is installed. Both go on
# where they were cut.
test-gpu:
	$(PYTHON) tools/gpu_tests.py

bench-gpu:
	mkdir -p .gpu-bench
	for what in latent indexer routes sparse_step mha; do \
		$(PYTHON) -m bench.$$what --json .gpu-bench/$$what.json || exit 1; \
	done

# Puts deliberate bugs into a copy of the package and shows which test catches each.
mutants: setup
	$(BIN)/python tools/mutants.py

# Writes the support table of README.md anew.
table: setup
	$(BIN)/python tools/support_table.py

setup:
	@$(PYTHON) tools/setup_env.py

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
