# One door to everything: `make` lists the targets.
#
# A fresh machine needs Python 3.11 or later and make. `setup` is a chain of stamp files, so every
# target may depend on it and costs nothing when nothing has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# Where `make run` keeps its data; override with DATA_DIR=...
DATA_DIR ?= data
# More arguments for pytest: make test ARGS="-k pop", ARGS=tests/unit/message
ARGS ?=
NAMED := $(filter tests tests/%,$(ARGS))
OR_NONE := $(if $(ARGS),|| test $$? -eq 5)
PYTEST := $(BIN)/python -m pytest
PURE := tests/unit tests/property tests/component tests/fuzz
PROTOS := $(shell find proto -name '*.proto')
NODE := tests/e2e/node
GO := tests/e2e/go
JAVA := tests/e2e/java
H2SPEC := tests/e2e/transport/h2spec
FUZZ := .venv-fuzz
CLIENTS := $(STAMPS)/node $(STAMPS)/go $(STAMPS)/java $(STAMPS)/h2spec

# What a step of `setup` does is told on standard error, one line a step; what goes wrong is shown in
# full. Nothing is told where nothing is to be done.
tell = @echo "setup: $(1)" >&2
PACKAGES = $$(sed -nE '/win32/d; s/^([A-Za-z0-9._-]+)(\[.*\])?==.*/\1/p' requirements.lock | sort -u | wc -l)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup run demo test heavy night sim soak fuzz lint types fmt proto docs bench ci lock clean

help: ## List the targets.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
		awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(STAMPS)/package ## Make the virtual environment, the stubs and .venv/bin/tidemill.
	@$(BIN)/python -m compileall -q services

run: setup ## Start a broker for a laptop in the foreground, data in ./data (DATA_DIR=...).
	@exec $(BIN)/tidemill standalone --data-dir $(DATA_DIR)

demo: setup ## Start a broker of its own, show sends, acks, expiry and dead letters, and stop it.
	@exec $(BIN)/python tools/demo.py

# What needs no process of its own runs on every core; real processes two at a time, each file by one
# worker, which may share a broker. What ARGS leaves nothing of is no failure.
# Files named in ARGS are tested in this process, which starts in a second and has a debugger.
ifeq ($(NAMED),)
test: setup $(CLIENTS) ## Pass the tests but the heavy ones; ARGS goes to pytest.
	$(PYTEST) -n auto --dist worksteal -m "not heavy" $(PURE) $(ARGS) $(OR_NONE)
	$(PYTEST) -n 2 --dist loadfile -m "not heavy" tests/e2e $(ARGS) $(OR_NONE)
else
test: setup $(if $(filter-out $(PURE) $(PURE:%=%/%),$(NAMED)),$(CLIENTS))
	$(PYTEST) $(ARGS)
endif

heavy: setup $(CLIENTS) ## Pass the heavy tests: kills, both transports, 400 days, memory.
	$(PYTEST) -n 2 --dist loadfile -m heavy $(ARGS)

night: setup $(CLIENTS) ## Try TIDEMILL_TEST_EXAMPLES (2000) of everything, and soak.
	TIDEMILL_TEST_EXAMPLES=$${TIDEMILL_TEST_EXAMPLES:-2000} $(PYTEST) -n auto --dist worksteal \
		-o faulthandler_timeout=0 -m "not heavy" $(PURE)
	@$(MAKE) --no-print-directory heavy soak

sim: setup ## Simulate BROKER_GROUPS (1) under SEEDS (200) seeds, from FIRST (0) on, and judge each.
	$(BIN)/python -m tests.simulation.run --seeds $${SEEDS:-200} --first $${FIRST:-0} \
		--groups $${BROKER_GROUPS:-1}

soak: setup ## Kill brokers and proxies under load for SOAK_MINUTES (30), and judge what clients saw.
	SOAK_MINUTES=$${SOAK_MINUTES:-30} $(PYTEST) tests/e2e/test_kill_loop.py \
		tests/e2e/test_timer_kill_loop.py $(ARGS)
	TIMER_SOAK_COUNT=1000000 $(PYTEST) tests/property/test_timer_long_horizon.py \
		-o faulthandler_timeout=0
	TRANSPORT_SOAK_CALLS=1000000 $(PYTEST) tests/e2e/transport/test_memory.py

fuzz: $(STAMPS)/fuzz ## Fuzz the transport for FUZZ_MINUTES (5), led by coverage; finds go to build/fuzz.
	@mkdir -p build/fuzz/corpus
	PYTHONPATH=services:. $(FUZZ)/bin/python -m tests.fuzz.fuzz_transport build/fuzz/corpus tests/fuzz/corpus \
		-artifact_prefix=build/fuzz/ -max_total_time=$$(( 60 * $${FUZZ_MINUTES:-5} )) $(ARGS)

lint: setup ## Check format, style and who imports whom.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: setup ## Check the types, strictly.
	$(BIN)/mypy

fmt: setup ## Format the code and fix what can be fixed mechanically.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMPS)/dependencies ## Generate the stubs from proto/ again.
	@rm -f $(STAMPS)/stubs
	@$(MAKE) --no-print-directory $(STAMPS)/stubs

docs: setup ## Generate docs/configuration.md and the OpenAPI document from the code.
	$(BIN)/python tools/generate_docs.py

bench: setup $(CLIENTS) ## Measure; see tests/perf for each question and its parameters.
	@for question in tests/perf/bench_*.py; do name=$$(basename $$question .py); echo "== $$name" >&2; $(BIN)/python -m tests.perf.$$name || exit 1; done

ci: lint types test heavy ## What CI runs.

lock: $(STAMPS)/venv ## Lock the dependencies again, after a change of pyproject.toml (needs uv).
	PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet pyproject.toml --extra dev --extra client \
		--output-file requirements.lock --python-version 3.11 --universal --no-header --no-annotate \
		--generate-hashes
	PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet tests/fuzz/requirements.in \
		--output-file tests/fuzz/requirements.lock --python-version 3.11 --no-header --no-annotate \
		--generate-hashes

clean: ## Remove what setup made; data stays.
	rm -rf $(VENV) $(FUZZ) services/tidemill/stubs $(NODE)/node_modules $(GO)/build $(JAVA)/target $(H2SPEC)/build

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tidemill needs Python 3.11 or later; try make PYTHON=python3.11" >&2; exit 1; }
	$(call tell,making the virtual environment $(VENV))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dependencies: $(STAMPS)/venv requirements.lock
	$(call tell,installing $(PACKAGES) packages; most of a minute)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(call tell,compiling the packages)
	@$(BIN)/python -m compileall -q $(VENV)/lib > /dev/null || true
	@touch $@

$(STAMPS)/stubs: $(STAMPS)/dependencies tools/generate_stubs.py $(PROTOS)
	$(call tell,generating the stubs from proto/)
	@$(BIN)/python tools/generate_stubs.py
	@touch $@

# Editable: the program runs what is in services/. Bytecode is compiled ahead, by `setup`, because the
# time from the command to the first stored message is promised.
$(STAMPS)/package: $(STAMPS)/stubs pyproject.toml
	$(call tell,installing and compiling tidemill)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(BIN)/python -m compileall -q services
	@touch $@

# Each official client is one more witness of the protocol; where the tool of one is missing, its
# tests are skipped.
$(STAMPS)/node: $(STAMPS)/venv $(NODE)/package-lock.json
	@if command -v npm > /dev/null; \
		then (cd $(NODE) && npm ci --silent --no-audit --no-fund) && touch $@; \
		else echo "npm is missing: the tests of the Node.js client are skipped"; fi

$(STAMPS)/go: $(STAMPS)/venv $(GO)/go.mod $(GO)/go.sum $(GO)/main.go
	@if command -v go > /dev/null; \
		then told=$$(cd $(GO) && go build -buildvcs=false -o build/scenarios . 2>&1) || \
			{ echo "$$told" >&2; exit 1; }; touch $@; \
		else echo "go is missing: the tests of the Go client are skipped"; fi

# What judges our transport from outside: h2spec and grpcurl.
$(STAMPS)/h2spec: $(STAMPS)/venv $(H2SPEC)/go.mod $(H2SPEC)/go.sum
	@if command -v go > /dev/null; \
		then told=$$(cd $(H2SPEC) && go build -buildvcs=false -o build/ \
			github.com/summerwind/h2spec/cmd/h2spec \
			github.com/fullstorydev/grpcurl/cmd/grpcurl 2>&1) || \
			{ echo "$$told" >&2; exit 1; }; touch $@; \
		else echo "go is missing: nobody else judges our transport"; fi

# Coverage comes from a library that nothing else needs, so it has an environment of its own.
$(STAMPS)/fuzz: $(STAMPS)/venv tests/fuzz/requirements.lock
	@test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r tests/fuzz/requirements.lock
	@touch $@

# Everything is made anew: a library of an earlier version would stay beside its successor.
$(STAMPS)/java: $(STAMPS)/venv $(JAVA)/pom.xml $(JAVA)/src/Scenarios.java
	@if command -v mvn > /dev/null; \
		then rm -rf $(JAVA)/target; told=$$(mvn -q -B -f $(JAVA) compile 2>&1) || \
			{ echo "$$told" >&2; exit 1; }; touch $@; \
		else echo "mvn is missing: the tests of the Java client are skipped"; fi
