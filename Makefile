# All commands of the repository; `make` lists the targets.
#
# A fresh machine needs Python 3.11 or later and make. `setup` is a chain of stamp files, so any
# target may depend on it; without a change it does nothing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# Where `make run` keeps its data; override with DATA_DIR=...
DATA_DIR ?= data
# The tag of the images that `make image` builds.
TAG ?= dev
# More arguments for pytest: make test ARGS="-k pop", ARGS=tests/unit/message
ARGS ?=
NAMED := $(filter tests tests/%,$(ARGS))
# ARGS that select no test are not a failure.
OR_NONE := $(if $(ARGS),|| test $$? -eq 5)
# Without bytecode, each worker of each run would compile the tests.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest
# Workers take whole files, the longest first: tests/schedule.py. Reports are for tools/slowest.py.
BY_FILE := --dist loadfile --no-loadscope-reorder
REPORTS := build/tests
LIGHT := "not heavy and not large and not cluster"
# Tests that use the CPU, and tests that wait for processes and sockets most of their time.
COMPUTING := tests/unit tests/property tests/fuzz tests/chart tests/monitoring
WAITING := tests/component tests/e2e tests/console
HEAVY = $(shell grep -rlE 'mark\.heavy' tests --include='test_*.py')
PROTOS := $(shell find proto -name '*.proto')
NODE := tests/e2e/node
GO := tests/e2e/go
JAVA := tests/e2e/java
RUST := tests/e2e/rust
H2SPEC := tests/e2e/transport/h2spec
HELM := tests/chart/helm
KUBE_SCORE := tests/chart/kube-score
CONSOLE := tests/console
CT := tests/chart/ct
BUF := tools/buf
CHART := charts/tidemill
GRAFANA := tests/monitoring/grafana
PROMETHEUS := tests/monitoring/prometheus
FUZZ := .venv-fuzz
# The tests that need Spark. Those of one worker share a Spark session.
SPARK := tests/pipeline
# The distribution of the data pipeline, with its own locks.
PIPELINE := services/tidemill_pipeline
CLIENTS := tool-node tool-go tool-java tool-h2spec tool-helm tool-browser
# Checkers of dashboards and alerts.
CHECKERS := tool-grafana tool-promtool

# Each step reports itself on standard error, with the seconds since the start of make. Output is
# shown only if the step fails.
ifndef MAKE_BEGAN_S
export MAKE_BEGAN_S := $(shell date +%s)
endif
say = echo "$(1): $$(( $$(date +%s) - MAKE_BEGAN_S )) s: $(2)" >&2
report = @$(call say,setup,$(1))
PACKAGES = $$(sed -nE '/win32/d; s/^([A-Za-z0-9._-]+)(\[.*\])?==.*/\1/p' requirements.lock | sort -u | wc -l)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-pipeline run demo test test-core test-pipeline heavy large shake night sim sim-mutants soak fuzz cluster-test meta-store-test lint types fmt proto docs charts dashboards image image-test image-pipeline package bench bench-compare ci lock clean
.PHONY: $(addprefix tool-,spark node go java rust h2spec grafana promtool prometheus helm kube-score ct buf browser)

help: ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | \
		awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

setup: $(STAMPS)/package ## Make the virtual environment, the stubs and .venv/bin/tidemill.
	@$(BIN)/python -m compileall -q services

run: setup ## Start a broker for a laptop, data in ./data (DATA_DIR=...); ARGS has more options.
	@exec $(BIN)/tidemill standalone --data-dir $(DATA_DIR) $(ARGS)

demo: setup ## Start a broker of its own, show sends, acks, expiry and dead letters, and stop it.
	@exec $(BIN)/python tools/demo.py

setup-pipeline: tool-spark ## Install Spark into the virtual environment: 0.7 gigabytes, which nothing but the pipeline needs.

# Files named in ARGS are tested in one process, which starts in a second and allows a debugger.
ifeq ($(NAMED),)
test: test-core test-pipeline ## Run all tests except the heavy ones; ARGS goes to pytest.

# Computing tests run beside waiting tests, with a lower priority: they use the idle CPU and cause no
# timeouts. Their output follows at the end.
test-core: setup $(CLIENTS) $(CHECKERS) ## Run the tests that do not need Spark, except the heavy ones.
	@mkdir -p $(REPORTS)
	@$(call say,tests,running; the output of the tests that compute follows at the end)
	@(nice -n 5 $(PYTEST) -q -n auto $(BY_FILE) -m $(LIGHT) --junitxml=$(REPORTS)/computing.xml \
		$(COMPUTING) $(ARGS) $(OR_NONE)) > $(REPORTS)/computing.log 2>&1 & computing=$$!; \
	trap 'kill $$computing' INT TERM; \
	($(PYTEST) -q -n 4 $(BY_FILE) -m $(LIGHT) --junitxml=$(REPORTS)/waiting.xml \
		$(WAITING) $(ARGS) $(OR_NONE)); waiting=$$?; \
	wait $$computing; computing=$$?; cat $(REPORTS)/computing.log; \
	exit $$((waiting | computing))

test-pipeline: setup setup-pipeline ## Run the tests of the data pipeline, which need Spark and Java 17 or 21.
	@mkdir -p $(REPORTS)
	@if command -v java > /dev/null; then \
		$(call say,tests,starting Spark and running the tests of the data pipeline); \
		$(PYTEST) -q -n 2 $(BY_FILE) -m $(LIGHT) --junitxml=$(REPORTS)/pipeline.xml $(SPARK) $(ARGS) $(OR_NONE); \
		else echo "java is missing: the tests of the data pipeline are skipped"; fi
else
test test-core test-pipeline: setup $(if $(filter $(SPARK) $(SPARK)/%,$(NAMED)),setup-pipeline) \
		$(if $(filter tests tests/e2e tests/e2e/%,$(NAMED)),$(CLIENTS)) \
		$(if $(filter tests/console%,$(NAMED)),tool-browser) \
		$(if $(filter tests tests/chart%,$(NAMED)),tool-helm) \
		$(if $(filter tests tests/monitoring%,$(NAMED)),tool-helm $(CHECKERS))
	$(PYTEST) $(ARGS)
endif

heavy: setup setup-pipeline $(CLIENTS) $(CHECKERS) ## Run the heavy tests: kills, both transports, 400 days, memory.
	@mkdir -p $(REPORTS)
	@$(PYTEST) -q -n 4 $(BY_FILE) -m heavy --junitxml=$(REPORTS)/heavy.xml \
		$(if $(NAMED),,$(HEAVY)) $(ARGS) $(OR_NONE)

large: setup setup-pipeline $(CLIENTS) tool-rust $(CHECKERS) tool-prometheus ## Run the large tests: Rust, a real Prometheus, all clients in a loop, kills under Spark.
	$(PYTEST) -m large $(ARGS)

shake: setup setup-pipeline $(CLIENTS) $(CHECKERS) ## Run each test that changed since BASE (HEAD) 20 times, beside a CPU load.
	@$(BIN)/python tools/shake.py $(or $(BASE),HEAD)

night: setup $(CLIENTS) ## Run TIDEMILL_TEST_EXAMPLES (2000) examples and seeds of each property, and the long tests.
	TIDEMILL_TEST_EXAMPLES=$${TIDEMILL_TEST_EXAMPLES:-2000} $(PYTEST) -n auto --dist worksteal \
		-o faulthandler_timeout=0 -m $(LIGHT) $(COMPUTING) tests/component
	@$(MAKE) --no-print-directory heavy large soak

# OF=replica_group simulates the replicas of one broker group and controllers. OF=replica_engines adds
# engines to them.
OF ?= run
sim: setup ## Simulate BROKER_GROUPS (1) under SEEDS (200) seeds, from FIRST (0) on; OF=replica_group.
	$(BIN)/python -m tests.simulation.$(OF) --seeds $${SEEDS:-200} --first $${FIRST:-0} \
		$(if $(filter run,$(OF)),--groups $${BROKER_GROUPS:-1} $(if $(REPLICAS),--replicas))

# Takes minutes. NAMES are the rules to relax. Default: all.
sim-mutants: setup ## Search SEEDS (2000) seeds for one that finds each relaxed rule of replication.
	$(BIN)/python -m tests.simulation.find_mutants --seeds $${SEEDS:-2000} $(NAMES)

# DURATION is the time of each loop in minutes. The first loop has everything; the others go deeper.
soak: setup setup-pipeline $(CLIENTS) ## Kill everything under load for DURATION (30) minutes, and check the history of clients and operators.
	SOAK_MINUTES=$${DURATION:-30} $(PYTEST) tests/e2e/test_everything_loop.py \
		tests/e2e/test_kill_loop.py \
		tests/e2e/test_timer_kill_loop.py tests/e2e/test_official_clients_loop.py \
		-o faulthandler_timeout=0 $(ARGS)
	TIMER_SOAK_COUNT=1000000 $(PYTEST) tests/property/test_timer_long_horizon.py \
		-o faulthandler_timeout=0
	TRANSPORT_SOAK_CALLS=1000000 $(PYTEST) tests/e2e/transport/test_memory.py

fuzz: $(STAMPS)/fuzz ## Fuzz the transport for FUZZ_MINUTES (5), led by coverage; finds go to build/fuzz.
	@mkdir -p build/fuzz/corpus
	PYTHONPATH=services:. $(FUZZ)/bin/python -m tests.fuzz.fuzz_transport build/fuzz/corpus tests/fuzz/corpus \
		-artifact_prefix=build/fuzz/ -max_total_time=$$(( 60 * $${FUZZ_MINUTES:-5} )) $(ARGS)

# KUBECONFIG names the cluster; docs/testing.md has the details. The nodes need both images:
# CLUSTER_LOAD is a command that is called with them, such as `kind load docker-image`.
IMAGE ?= tidemill:$(TAG)
LOAD_IMAGE ?= tidemill-load:$(TAG)
NAMESPACE ?= tidemill-chaos
FAULTS ?=
cluster-test: setup setup-pipeline tool-node tool-go tool-java ## Disturb a release on a cluster under load (IMAGE, FAULTS=name,...), and keep the ledger.
	tests/chaos/image/make $(LOAD_IMAGE)
	$(if $(CLUSTER_LOAD),$(CLUSTER_LOAD) $(IMAGE) $(LOAD_IMAGE))
	$(BIN)/python -m tests.chaos.run --image $(IMAGE) --load-image $(LOAD_IMAGE) --namespace $(NAMESPACE) \
		--values "$(CLUSTER_VALUES)" --faults "$(FAULTS)" $(ARGS)

# The API server has the types of charts/tidemill/crds. The current context has all rights in
# NAMESPACE.
meta-store-test: setup ## Run the tests of stores of group records against the API server of KUBECONFIG.
	KUBECONFIG=$(KUBECONFIG) TIDEMILL_TEST_NAMESPACE=$(NAMESPACE) \
		$(BIN)/python -m pytest -q -m cluster tests/component/controller/test_kubernetes_store.py

# values-dev.yaml has neither policies nor claims. A throttled broker or proxy delays all its clients
# (docs/kubernetes/sizing.md). A node pulls a tag once.
UNSCORED := --ignore-container-cpu-limit --ignore-test container-image-pull-policy
SCORED := default ha prod cert-manager
lint: setup tool-helm tool-kube-score tool-ct tool-buf ## Check style, imports, dead code, names, prose, commit subjects, protos and the chart.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python -m tools.check_imports
	$(BIN)/vulture
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive services
	$(BIN)/python -m tools.audit_dependencies requirements.lock $(PIPELINE)/requirements.lock
	$(BIN)/deptry --no-ansi services/tidemill
	cd $(PIPELINE) && $(CURDIR)/$(BIN)/deptry --no-ansi . ../pyspark_tidemill
	$(BIN)/python -m tools.check_names
	$(BIN)/python -m tools.check_prose
	$(BIN)/python -m tools.check_commits
	$(BIN)/python -m tools.check_protos
	@! test -x $(HELM)/build/helm || for values in $(CHART)/values*.yaml; do \
		$(HELM)/build/helm lint --quiet --strict --kube-version 1.33 -f $$values $(CHART) || exit 1; done
	@mkdir -p build
	@! test -x $(CT)/build/ct || PATH="$(CURDIR)/$(CT)/build:$(CURDIR)/$(HELM)/build:$(CURDIR)/$(BIN):$$PATH" \
		ct lint --charts $(CHART) --check-version-increment=false --validate-maintainers=false \
		--chart-yaml-schema $(CT)/build/chart_schema.yaml --lint-conf $(CT)/build/lintconf.yaml \
		--helm-lint-extra-args "--kube-version 1.33" > build/ct.log || { cat build/ct.log; exit 1; }
	@! test -x $(KUBE_SCORE)/build/kube-score || for golden in $(SCORED); do \
		$(KUBE_SCORE)/build/kube-score score --kubernetes-version v1.33 --output-format ci $(UNSCORED) \
		tests/chart/golden/$$golden.yaml | { ! grep CRITICAL; } || exit 1; done

# A fresh tree starts with the results of the last tree that passed. They are one file, which a rename
# replaces.
MYPY_RESULTS = $${XDG_CACHE_HOME:-$$HOME/.cache}/tidemill/mypy-$$(cksum < requirements.lock | tr -d ' ').tar
types: setup ## Check the types, strictly.
	@test -d .mypy_cache || tar -xf $(MYPY_RESULTS) 2> /dev/null || true
	$(BIN)/mypy
	@results=$(MYPY_RESULTS) && mkdir -p "$${results%/*}" && tar -cf "$$results.$$$$" .mypy_cache && \
		mv "$$results.$$$$" "$$results"

fmt: setup ## Format the code and fix what can be fixed mechanically.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMPS)/dependencies ## Generate the stubs from proto/ again.
	@rm -f $(STAMPS)/stubs
	@$(MAKE) --no-print-directory $(STAMPS)/stubs

docs: setup ## Generate docs/configuration.md and the OpenAPI document from the code.
	$(BIN)/python tools/generate_docs.py

dashboards: setup ## Generate the dashboards and the alerts for a laptop from tools/monitoring and the chart.
	$(BIN)/python tools/generate_dashboards.py

charts: setup tool-helm ## Render the chart again into tests/chart/golden, and its schema.
	$(BIN)/python tools/generate_docs.py
	$(BIN)/python -m tests.chart.render

image: ## Build the image of each process (TAG=dev), and record sizes, start times and SBOMs in build/image.
	@deploy/image/make $(TAG)

image-test: setup ## Build the image, start compose.yaml, and send, receive and remove all of it (needs Docker).
	$(PYTEST) -q -rs -m heavy tests/image $(ARGS)

image-pipeline: ## Build the image of the data pipeline, with Spark and Java (TAG=dev).
	docker build --file deploy/spark/Dockerfile --tag tidemill-spark:$(TAG) .

package: setup tool-helm ## Package the chart and build the images of both architectures into build/package (KEY, CHARTS, REGISTRY).
	@HELM=$(HELM)/build/helm PYTHON=$(BIN)/python deploy/package/make

bench: setup $(CLIENTS) ## Measure; see tests/perf for each question and its parameters.
	@for question in tests/perf/bench_*.py; do name=$$(basename $$question .py); echo "== $$name" >&2; $(BIN)/python -m tests.perf.$$name || exit 1; done

# PAIRS (5) of runs give an interval for each figure; LIMIT (1.03) is the ratio that is still allowed.
# TARGETS (setup) prepare the tree of BASE; ARGS go to each benchmark.
bench-compare: setup ## Compare the CPU time of benchmarks ONLY=NAME,... with that of the commit BASE.
	@$(BIN)/python -m tools.bench_compare --base $(BASE) --only $(ONLY) --pairs $(or $(PAIRS),5) \
		--limit $(or $(LIMIT),1.03) --targets "$(or $(TARGETS),setup)" -- $(ARGS)

ci: lint types test heavy ## Run everything that CI runs.

# The lock file of an image: the packages of its process and of the command line, in the versions of
# requirements.lock. Only the broker needs numpy.
lock_image = PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet $(2) --constraint requirements.lock \
	--output-file deploy/image/$(1).lock --python-version 3.11 --python-platform linux --no-header \
	--no-annotate --generate-hashes

lock: $(STAMPS)/venv ## Lock the dependencies again, after a change of pyproject.toml (needs uv).
	PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet pyproject.toml --extra dev --extra client \
		--output-file requirements.lock --python-version 3.11 --universal --no-header --no-annotate \
		--generate-hashes
	PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet $(PIPELINE)/pyproject.toml \
		--constraint requirements.lock --output-file $(PIPELINE)/requirements.lock --python-version 3.11 \
		--no-emit-package tidemill --universal --no-header --no-annotate --generate-hashes
	PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet $(PIPELINE)/pyproject.toml --extra tests \
		--constraint requirements.lock --constraint $(PIPELINE)/requirements.lock \
		--output-file $(PIPELINE)/requirements-tests.lock --python-version 3.11 \
		--no-emit-package tidemill --universal --no-header --no-annotate --generate-hashes
	$(call lock_image,build,deploy/image/build.in)
	$(call lock_image,broker,pyproject.toml --extra cli)
	$(call lock_image,proxy,pyproject.toml --extra cli --extra secrets --no-emit-package numpy)
	$(call lock_image,admin,pyproject.toml --extra admin --extra release --no-emit-package numpy)
	$(call lock_image,tidemill,pyproject.toml --extra standalone --extra release)
	PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet $(CONSOLE)/requirements.in \
		--constraint requirements.lock --output-file $(CONSOLE)/requirements.lock --python-version 3.11 \
		--universal --no-header --no-annotate --generate-hashes
	PATH="$(CURDIR)/$(BIN):$$PATH" uv pip compile --quiet tests/fuzz/requirements.in \
		--output-file tests/fuzz/requirements.lock --python-version 3.11 --no-header --no-annotate \
		--generate-hashes

clean: ## Remove what `make setup` and the tests have made here; data and the cache of tools stay.
	rm -rf $(VENV) $(FUZZ) services/tidemill/stubs $(NODE)/node_modules $(GO)/build $(JAVA)/target $(RUST)/target \
		$(H2SPEC)/build $(HELM)/build $(KUBE_SCORE)/build $(CT)/build $(GRAFANA)/node_modules $(BUF)/node_modules $(PROMETHEUS)/build build

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tidemill needs Python 3.11 or later; try make PYTHON=python3.11" >&2; exit 1; }
	$(call report,making the virtual environment $(VENV))
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dependencies: $(STAMPS)/venv requirements.lock
	$(call report,installing $(PACKAGES) packages; most of a minute)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(call report,compiling the packages)
	@$(BIN)/python -m compileall -q $(VENV)/lib > /dev/null || true
	@touch $@

$(STAMPS)/stubs: $(STAMPS)/dependencies tools/generate_stubs.py $(PROTOS)
	$(call report,generating the stubs from proto/)
	@$(BIN)/python tools/generate_stubs.py
	@touch $@

# The package is editable: the program runs the code in services/. `setup` compiles the bytecode, so
# that the first start is as fast as the next ones.
$(STAMPS)/package: $(STAMPS)/stubs pyproject.toml $(PIPELINE)/pyproject.toml
	$(call report,installing and compiling tidemill)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		-e . -e services/tidemill_pipeline
	@$(BIN)/python -m compileall -q services
	@touch $@
	$(call report,the virtual environment is ready)

# The tools of the tests are built once per machine and linked into this tree. These targets are not
# files: tools/cached_build.py compares hashes to decide whether to build.
CACHED := $(BIN)/python tools/cached_build.py

# PySpark comes as source; pip builds it with the setuptools of requirements.lock. Its packages follow
# those of the virtual environment on the path. Java's archive of Spark's classes names the absolute
# paths of the jars, so it belongs to this cached copy.
SPARK_LOCK := $(PIPELINE)/requirements-tests.lock
tool-spark: $(STAMPS)/package
	@$(CACHED) spark --input $(SPARK_LOCK) --key "$$($(BIN)/python -VV)" --link $(VENV)/spark \
		'$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--require-hashes --target "$$OUT" -r $(SPARK_LOCK)'
	@readlink $(VENV)/spark > $$(echo $(VENV)/lib/python3*/site-packages)/spark.pth
	@$(CACHED) spark-classes --needs java --skipped "the tests of the data pipeline are skipped" \
		--key "$$(readlink $(VENV)/spark; java -version 2>&1)" --link $(VENV)/share/tidemill \
		'rm -rf $(VENV)/share/tidemill; $(BIN)/tidemill pipeline prepare; mv $(VENV)/share/tidemill/*.jsa "$$OUT"' \
		|| echo "setup: Spark starts without an archive of classes, which takes longer" >&2

# The official clients. Where the program of one is missing, its tests are skipped.
tool-node: $(STAMPS)/venv
	@$(CACHED) node --needs npm --skipped "the tests of the Node.js client are skipped" \
		--input $(NODE)/package.json $(NODE)/package-lock.json --link $(NODE)/node_modules=node_modules \
		'cp $(NODE)/package*.json "$$OUT" && cd "$$OUT" && npm ci --silent --no-audit --no-fund'

tool-go: $(STAMPS)/venv
	@$(CACHED) go --needs go --skipped "the tests of the Go client are skipped" \
		--input $(GO)/go.mod $(GO)/go.sum $(wildcard $(GO)/*.go) --link $(GO)/build \
		'cd $(GO) && go build -buildvcs=false -o "$$OUT/scenarios" .'

tool-java: $(STAMPS)/venv
	@$(CACHED) java --needs mvn --skipped "the tests of the Java client are skipped" \
		--input $(JAVA)/pom.xml $(wildcard $(JAVA)/src/*.java) --link $(JAVA)/target=target \
		'cp -R $(JAVA)/pom.xml $(JAVA)/src "$$OUT" && mvn -q -B -f "$$OUT" compile'

# For `make large` only: Cargo compiles 250 packages, two minutes of a core. They stay in $CACHE/cargo.
tool-rust: $(STAMPS)/venv
	@$(CACHED) rust --needs cargo --skipped "the tests of the Rust client are skipped" \
		--input $(RUST)/Cargo.toml $(RUST)/Cargo.lock $(wildcard $(RUST)/src/*.rs) --link $(RUST)/target \
		'cd $(RUST) && cargo build --locked --quiet --target-dir "$$CACHE/cargo" && \
		mkdir "$$OUT/debug" && cp "$$CACHE/cargo/debug/scenarios" "$$OUT/debug"'

# The independent judges of our HTTP/2 and gRPC.
tool-h2spec: $(STAMPS)/venv
	@$(CACHED) h2spec --needs go --skipped "h2spec and grpcurl do not check our transport" \
		--input $(H2SPEC)/go.mod $(H2SPEC)/go.sum --link $(H2SPEC)/build \
		'cd $(H2SPEC) && go build -buildvcs=false -o "$$OUT/" github.com/summerwind/h2spec/cmd/h2spec \
		github.com/fullstorydev/grpcurl/cmd/grpcurl'

# A browser and its driver, for the tests of the console.
tool-browser: $(STAMPS)/package
	@command -v chromium > /dev/null || ! command -v apt-get > /dev/null || test "$$(id -u)" != 0 || \
		{ $(call say,setup,installing chromium); apt-get update -q > /dev/null; \
		apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core > /dev/null; }
	@$(CACHED) browser --needs chromium --skipped "the console is not tested in a browser" \
		--input $(CONSOLE)/requirements.lock --key "$$($(BIN)/python -VV)" --link $(VENV)/browser \
		'$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--target "$$OUT" -r $(CONSOLE)/requirements.lock'
	@! test -e $(VENV)/browser || readlink $(VENV)/browser > \
		$$(echo $(VENV)/lib/python3*/site-packages)/browser.pth

# The linter of .proto files.
tool-buf: $(STAMPS)/venv
	@$(CACHED) buf --needs npm --skipped "the .proto files are not checked" \
		--input $(BUF)/package.json $(BUF)/package-lock.json --link $(BUF)/node_modules=node_modules \
		'cp $(BUF)/package*.json "$$OUT" && cd "$$OUT" && npm ci --silent --no-audit --no-fund'

# The types that Grafana publishes, to check our dashboards.
tool-grafana: $(STAMPS)/venv
	@$(CACHED) grafana --needs npm --skipped "the types of the dashboards are not checked" \
		--input $(GRAFANA)/package.json $(GRAFANA)/package-lock.json \
		--link $(GRAFANA)/node_modules=node_modules \
		'cp $(GRAFANA)/package*.json "$$OUT" && cd "$$OUT" && npm ci --silent --no-audit --no-fund'

# promtool checks our alerts. Prometheus itself is for `make large`. The tags leave out the service
# discoveries, which would need the libraries of a dozen clouds.
tool-promtool tool-prometheus: tool-%: $(STAMPS)/venv
	@$(CACHED) $* --needs go --skipped "the alerts are not checked" \
		--input $(PROMETHEUS)/go.mod $(PROMETHEUS)/go.sum --link $(PROMETHEUS)/build/$*=$* \
		'cd $(PROMETHEUS) && go build -buildvcs=false -trimpath -ldflags "-s -w" \
		-tags remove_all_sd,enable_dns_sd -o "$$OUT/" github.com/prometheus/prometheus/cmd/$*'

# Renders the chart, without a cluster.
tool-helm: $(STAMPS)/venv
	@$(CACHED) helm --needs go --skipped "the chart is not checked" \
		--input $(HELM)/go.mod $(HELM)/go.sum --link $(HELM)/build \
		'cd $(HELM) && CGO_ENABLED=0 go build -buildvcs=false -ldflags "-s -w" -o "$$OUT/" \
		helm.sh/helm/v3/cmd/helm'

# Judges the rendered chart by common rules for pods.
tool-kube-score: $(STAMPS)/venv
	@$(CACHED) kube-score --needs go --skipped "the rendered chart is not scored" \
		--input $(KUBE_SCORE)/go.mod $(KUBE_SCORE)/go.sum --link $(KUBE_SCORE)/build \
		'cd $(KUBE_SCORE) && CGO_ENABLED=0 go build -buildvcs=false -ldflags "-s -w" -o "$$OUT/" \
		github.com/zegl/kube-score/cmd/kube-score'

# The rules for charts of chart-testing, which calls yamllint and yamale. It compares versions and
# maintainers with a public repository, so `make lint` leaves out these two rules.
tool-ct: $(STAMPS)/venv
	@$(CACHED) ct --needs go --skipped "ct does not check the chart" \
		--input $(CT)/go.mod $(CT)/go.sum $(CT)/requirements.lock $(CT)/run-module --link $(CT)/build \
		'$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes \
		--target "$$OUT/.python" -r $(CT)/requirements.lock && \
		cp $(CT)/run-module "$$OUT/yamllint" && cp $(CT)/run-module "$$OUT/yamale" && cd $(CT) && \
		go mod download github.com/helm/chart-testing/v3 && \
		cp $$(go list -m -f "{{.Dir}}" github.com/helm/chart-testing/v3)/etc/*.yaml "$$OUT" && \
		CGO_ENABLED=0 go build -buildvcs=false -ldflags "-s -w" -o "$$OUT/" \
		github.com/helm/chart-testing/v3/ct'

# Coverage comes from a library that nothing else needs, so it has an environment of its own.
$(STAMPS)/fuzz: $(STAMPS)/venv tests/fuzz/requirements.lock
	@test -x $(FUZZ)/bin/python || $(PYTHON) -m venv $(FUZZ)
	$(FUZZ)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r tests/fuzz/requirements.lock
	@touch $@
