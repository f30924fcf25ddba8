# make retrain [PROFILE=quick] [SET="key=value ..."]   retrains the drafter and proves it
# make evaluate-full [PROFILE=quick] [SET=...]         the same, evaluated under load and over long contexts too
# make serve [PACKAGE=package] [PORT=8000]              an OpenAI-compatible server with the drafter
# make test                                            every test that this machine can run
# make bench-train [BENCH="--threads 1"]                our training step against speculators'
# make bench-extract                                    extraction against plain prefill and transformers
# make bench-cache                                      reading states against safetensors and Arrow
# make bench-serve                                      draft rules and a plain engine under load
# make bench-quality PROMPTS=DIR [SEED=n] [BUDGETS=300,1200]   ours against speculators' trainer
# make screenshots                                      pictures of evaluation/report.html for docs/; needs Chromium
# Each target makes .venv on first use; after that it costs nothing.

PROFILE ?= default
SET ?=
PYTEST ?=
BUDGETS ?= 300,1200
SEED ?=
PROMPTS ?=
BENCH ?=
PACKAGE ?= package
PORT ?= 8000
PYTHON ?= python3
REQUIREMENTS ?= $(if $(shell command -v nvidia-smi),gpu,cpu)

# Cached byte code halves every start of a server.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Nothing sends telemetry.
export DO_NOT_TRACK := 1
export DVC_NO_ANALYTICS := 1
export MLFLOW_DISABLE_TELEMETRY := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export VLLM_NO_USAGE_STATS := 1

.PHONY: bench-cache bench-extract bench-quality bench-serve bench-train evaluate-full retrain serve test
.PHONY: lint screenshots ui serve-flows setup lock
.DEFAULT_GOAL := retrain

retrain: setup
	@python -m flows.retrain --profile $(PROFILE) $(foreach value,$(SET),--set '$(value)')

evaluate-full: setup
	@python -m flows.retrain --profile $(PROFILE) --set evaluate.depth=full $(foreach value,$(SET),--set '$(value)')

serve: setup
	@exec python -m stages.serving.serve --package "$(PACKAGE)" --port $(PORT)

test: setup .venv/.dev-installed
	@python -m pytest $(PYTEST)

lint: setup .venv/.dev-installed
	ruff check .
	ruff format --check .
	mypy

bench-train: setup .venv/.dev-installed
	@python -m bench.train_step $(BENCH)

bench-extract: setup .venv/.dev-installed
	@python -m bench.extract $(BENCH)

bench-cache: setup .venv/.dev-installed
	@python -m bench.cache $(BENCH)

bench-serve: setup
	@python -m bench.serve --package "$(PACKAGE)" $(BENCH)

# BENCH takes further options, such as --all-rates or --data-only (docs/bench-quality.md).
bench-quality: setup .venv/.dev-installed
	@test -n "$(PROMPTS)" || { echo "make bench-quality: set PROMPTS=DIR, a folder of JSONL files" >&2; exit 1; }
	@python -m bench.quality --prompts "$(PROMPTS)" --budgets "$(BUDGETS)" $(if $(SEED),--seed $(SEED)) $(BENCH)

screenshots: setup .venv/.dev-installed
	@python -m tools.screenshots evaluation/report.html --out docs

ui: setup
	@echo "MLflow: http://127.0.0.1:5000 (Ctrl-C ends it)"
	@mlflow server --backend-store-uri sqlite:///mlflow.db --host 127.0.0.1 --port 5000

serve-flows: setup
	@python -m flows.serve

setup: .venv/.installed
	@mkdir -p run/prefect

.venv/.installed: tools/setup.sh requirements/$(REQUIREMENTS).txt requirements/data.txt
	@PYTHON=$(PYTHON) tools/setup.sh .installed requirements/$(REQUIREMENTS).txt requirements/data.txt

.venv/.dev-installed: .venv/.installed requirements/dev.txt
	@PYTHON=$(PYTHON) tools/setup.sh .dev-installed requirements/dev.txt

# Needs uv. UV_FIND_LINKS or UV_INDEX says where torch +cpu is, if your uv does not know.
lock:
	tools/lock.sh
