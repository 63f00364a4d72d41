# make demo: environment, a small quantization, its checks. make test: environment, style, types, tests.
# Everything goes into .venv; nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
DEMO_SOURCE = examples/tiny-glm-5-fp8
DEMO_OUT = demo-out/tiny-glm-5-int4

.PHONY: demo test style quality unit kernels test-gpu build clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 13) else "kvq needs Python 3.11 to 3.13, found " + sys.version.split()[0] + "; give one with make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	rm -rf demo-out
	$(BIN)/kvq quantize $(DEMO_SOURCE) --w int4 --set num_calibration_samples=64 --set max_seq_length=512 --out $(DEMO_OUT)
	$(BIN)/kvq verify $(DEMO_OUT) --source $(DEMO_SOURCE)
	$(BIN)/kvq evaluate $(DEMO_OUT) --source $(DEMO_SOURCE) --data examples/held-out.jsonl

test: quality unit kernels

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/installed
	$(BIN)/python -m pytest

# The GPU's loops in Triton's interpreter. Not in the environment itself: there it would change what other packages do.
TRITON = $(VENV)/triton
$(TRITON)/triton: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.6.0

kernels: $(TRITON)/triton
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/quantize/test_triton_kernels.py

test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -m gpu

style: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

clean:
	rm -rf $(VENV) demo-out dist build .pytest_cache .mypy_cache .ruff_cache
