# `make eval` runs the main job, `make test` the checks, `make docs` builds the site, `make results` measures everything that
# is quoted again; all set up .venv first.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin

.PHONY: eval test lint docs pages results

eval: $(VENV)/installed
	$(BIN)/oretrofit eval --seeds 3

test: lint
	$(BIN)/python -m pytest -q --numprocesses 2 --dist loadfile

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# docs/results.md, and what the README quotes, from results/.
pages: $(VENV)/installed
	$(BIN)/python -m oretrofit.experiments.results_page

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(VENV)/typing $(BIN)/mypy -p oretrofit

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -e ".[dev]"
	# The root is the package, whatever its folder is called: give the type checker its name.
	mkdir -p $(VENV)/typing && ln -sfn "$(CURDIR)" $(VENV)/typing/oretrofit
	touch $@

# ---- Everything that results/ holds, measured again ------------------------------------------------------------------
#
# Hours, on a machine with nothing else to do. What is finished stays in runs/measured: the same command goes on from
# there. Only when all is measured does it take the place of results/, and the pages are written anew.

MEASURED := runs/measured
R := $(MEASURED)/results

measure-eval-float32 = oretrofit eval --seeds 3 --out $(R)/eval-float32
measure-eval-closed = oretrofit eval --seeds 3 --variant closed --out $(R)/eval-closed
measure-eval-auto = oretrofit eval --seeds 3 --precision auto --out $(R)/eval-auto
measure-eval-rdata = oretrofit eval --suite rdata --seeds 3 --variant oa --variant full-o --variant closed --out $(R)/eval-rdata-float32
measure-eval-rdata-second-host = oretrofit pretrain --steps 2500 --seed 1 --out $(MEASURED)/second-host && cp $(MEASURED)/second-host/oretrofit-small-v3-regressor.safetensors $(MEASURED)/second-v3-regressor.safetensors && $(BIN)/oretrofit eval --suite rdata --seeds 2 --variant oa --variant full-o --variant closed --host $(MEASURED)/second-v3-regressor.safetensors --out $(R)/eval-rdata-second-host && cp $(MEASURED)/second-host/loss.csv $(R)/eval-rdata-second-host
measure-frontier = oretrofit frontier --json $(R)/frontier.json --plot $(R)/frontier.png
measure-frontier-mini = oretrofit frontier --suite mini --seeds 1 --json $(R)/frontier-mini.json --plot $(R)/frontier-mini.png
measure-overhead = oretrofit bench overhead --rounds 15 --json $(R)/overhead.json
measure-ragged-small = oretrofit bench ragged --tables 200 --rounds 3 --json $(R)/ragged-small-200.json
measure-ragged-100 = oretrofit bench ragged --tables 100 --rounds 3 --against parallel_loop --json $(R)/ragged-small-100.json
measure-ragged-2000 = oretrofit bench ragged --tables 2000 --rounds 1 --against parallel_loop --json $(R)/ragged-small-2000.json
measure-ragged-5000 = oretrofit bench ragged --tables 5000 --rounds 1 --against parallel_loop --json $(R)/ragged-small-5000.json
measure-ragged-full = oretrofit bench ragged --host random-v3 --tables 40 --rounds 1 --json $(R)/ragged-random-v3-40.json
measure-ragged-equality = oretrofit bench ragged-equality --tables 200 --json $(R)/ragged-equality.json
measure-removal = python examples/removal.py --rounds 3 --json $(R)/removal.json
measure-panel = python examples/panel.py --json $(R)/panel.json --plot docs/pictures/panel.png
measure-contracts = oretrofit contracts --json $(R)/contracts.json
measure-ablation = oretrofit ablate --json $(R)/ablation/table.json --plot $(R)/ablation/states.png
measure-audit = oretrofit audit --json $(R)/audit.json
measure-host = oretrofit bench host --json $(R)/host.json
measure-host-rdata = oretrofit bench host --suite rdata --json $(R)/host-rdata.json
measure-memory = python examples/many_groups.py measure --json $(R)/cluster-memory.json
measure-pretrain = oretrofit pretrain --host $(MEASURED)/first-v3.safetensors --steps 3600 --seed 2 --learning-rate 2e-3 --out $(MEASURED)/pretrain && cp $(MEASURED)/pretrain/loss.csv results/pretrain/loss-first.csv $(R)/pretrain

MEASUREMENTS := $(patsubst measure-%,$(MEASURED)/done/%,$(filter measure-%,$(.VARIABLES)))

.NOTPARALLEL: # times are measured

results: $(MEASUREMENTS)
	rm -r results && mv $(R) results && rm -r $(MEASURED)
	$(MAKE) pages

$(MEASURED)/done/%: $(VENV)/installed
	mkdir -p $(@D) $(R)/ablation $(R)/pretrain
	$(BIN)/$(measure-$*)
	touch $@

# The weights that the bundled host's last training began with.
$(MEASURED)/done/pretrain: $(MEASURED)/first-v3.safetensors
$(MEASURED)/first-v3.safetensors:
	mkdir -p $(@D)
	git show ec00229:retrofit/hosts/oretrofit-small-v3-regressor.safetensors > $@
