# `make demo` shows it, `make test` tests it. All make the environment first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/pytest --numprocesses auto --dist loadfile
DEMO := .demo
PEERS := .venv-peers
DOCS := .venv-docs
PICTURED := reports/dqn-CartPole-v1

.PHONY: demo quick test fuzz results docs site test-system browser-test picture peers lint format lock clean

demo: $(VENV)/installed  ## Train, export, evaluate and report one policy, in a folder of its own.
	$(BIN)/quarl run --algo dqn --env CartPole-v1 --seed 0 --root $(DEMO)

quick: $(VENV)/installed  ## Run the tests of single parts, a minute or two.
	$(PYTEST) tests/unit

test: $(VENV)/installed  ## Run those of trainings and studies, too.
	$(PYTEST) tests/unit tests/slow

fuzz: $(VENV)/installed  ## Give the commands 10,000 damaged files.
	QUARL_FUZZ=10000 $(BIN)/pytest tests/slow/test_fuzz.py

results: $(VENV)/installed  ## Render every report again from its records, and check what is published.
	$(BIN)/python pipelines/results.py
	$(BIN)/python pipelines/index.py
	$(BIN)/python docs/pages/fill.py
	$(PYTEST) tests/results

docs: site  ## Build the documentation and show it in the browser.
	$(DOCS)/bin/python -m webbrowser site/index.html

site: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build --strict --quiet

test-system: $(VENV)/installed  ## Test installations, clusters, the browser and fuzzing; needs the network and chromium.
	$(BIN)/pip install --quiet --constraint requirements.txt --editable '.[cluster]'
	$(BIN)/pytest tests/system
	$(MAKE) fuzz

browser-test: $(VENV)/installed  ## Play reports in headless Chromium (Debian's package chromium); screenshots go to build/browser.
	$(BIN)/pytest tests/system/test_browser.py

picture:  ## Take the README's picture of a report, in headless Chromium.
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1200,1330 \
		--screenshot=$(PICTURED)/page.png file://$(CURDIR)/$(PICTURED)/index.html
	$(BIN)/python -c "from PIL import Image; page = '$(PICTURED)/page.png'; \
		Image.open(page).convert('RGB').quantize(128, dither=Image.Dither.NONE).save(page, optimize=True)"

peers: $(PEERS)/installed  ## Install what the benchmarks compare training with.

lint: $(VENV)/installed  ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed  ## Put the code in order.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The marker comes last: a half-made environment is made again.
$(VENV)/installed: requirements.txt setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

# PyTorch and TF-Agents want other versions of the same packages, hence another environment. PyTorch goes
# first, by version: as a dependency of the others pip may take one with gigabytes for GPUs.
$(PEERS)/installed:
	$(PYTHON) -m venv --clear $(PEERS)
	$(PEERS)/bin/pip install --quiet torch==2.13.0
	$(PEERS)/bin/pip install --quiet 'stable-baselines3[extra]==2.9.2' sbx-rl==0.28 ale-py Box2D
	touch $@

$(DOCS)/installed: setup.cfg
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip install --quiet --editable '.[docs]'
	touch $@

lock:  ## Resolve setup.cfg anew into requirements.txt.
	$(PYTHON) -m venv --clear .lock
	.lock/bin/pip install --quiet --editable '.[train,boards,dev]'
	.lock/bin/pip freeze --exclude-editable > requirements.txt
	rm -rf .lock

clean:
	rm -rf $(VENV) $(PEERS) $(DOCS) $(DEMO) site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
