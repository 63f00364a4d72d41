# make demo: environment, a small quantization, its checks. make test: environment, style, types, tests.
# Everything goes into .venv; nothing else on the machine is touched.

PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
DEMO_SOURCE = examples/tiny-glm-5-fp8
DEMO_OUT = demo-out/tiny-glm-5-int4
SGLANG_VERSIONS = 0.5.17 0.5.23

.PHONY: demo test style quality unit kernels contract test-gpu soak fuzz page-tags-million build test-build clean

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

test: quality unit kernels contract

quality: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/installed
	$(BIN)/python -m pytest

# The GPU's loops in Triton's interpreter. Not in the environment itself: there it would change what other packages do.
# Its interpreter needs a numpy before 2.4, which lies beside it and comes first on the path.
TRITON = $(VENV)/triton
$(TRITON)/installed: $(VENV)/installed
	rm -rf $(TRITON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TRITON) triton==3.6.0 numpy==2.3.5
	touch $@

kernels: $(TRITON)/installed
	TRITON_INTERPRET=1 PYTHONPATH=$(TRITON) $(BIN)/python -m pytest tests/quantize/test_triton_kernels.py \
	  tests/integrity/test_kernels.py

# The engine's own code on a CPU, in environments of their own: SGLang wants other versions of transformers and
# compressed-tensors than kvq. They lie over .venv, which has torch and pytest. The cases are made by kvq, read by SGLang.
# One thread: the tests fork, and OpenMP's pool of several does not survive that.
contract: $(SGLANG_VERSIONS:%=.venv-sglang-%/installed)
	rm -rf .contract-cases
	$(BIN)/python -m tests.contract.make_cases .contract-cases
	for version in $(SGLANG_VERSIONS); do \
	  OMP_NUM_THREADS=1 KVQ_CONTRACT_CASES=.contract-cases .venv-sglang-$$version/bin/python -m pytest tests/contract \
	    --confcutdir=tests/contract -W default -p no:cacheprovider || exit 1; done

.venv-sglang-%/installed: tests/contract/sglang-%.txt tests/contract/shared.txt $(VENV)/installed
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >$(@D)/kvq.pth
	mv $(@D)/kvq.pth "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
	touch $@

test-gpu: $(VENV)/installed
	$(BIN)/python -m pytest -m gpu

page-tags-million: $(VENV)/installed
	$(BIN)/python -m tests.integrity.drive 1000000

# Longer than what the tests run; other seeds give other points and inputs. soak needs a C compiler (cc).
SEED ?= 1
POINTS ?= 1000
TRIALS ?= 200
INPUTS ?= 200000

soak: $(VENV)/installed
	$(BIN)/python -m tests.faults.soak --points $(POINTS) --seed $(SEED) --scratch "$$(mktemp -d)"
	$(BIN)/python -m tests.faults.hindrances --trials $(TRIALS) --seed $(SEED) --scratch "$$(mktemp -d)"

fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz.run --inputs $(INPUTS) --seed $(SEED)

style: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

build: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check build
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

# The wheel is made from the sdist, installed in an environment of its own, and does a small job away from the sources.
test-build: build
	rm -rf build/fresh && mkdir -p build/fresh/run
	$(PYTHON) -m venv build/fresh/venv
	build/fresh/venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build/fresh/run && ../venv/bin/kvq --version && ../venv/bin/kvq doctor --offline
	cd build/fresh/run && ../venv/bin/kvq quantize ../../../$(DEMO_SOURCE) --w int4-rtn --out out
	cd build/fresh/run && ../venv/bin/kvq verify out --source ../../../$(DEMO_SOURCE)

clean:
	rm -rf $(VENV) .venv-sglang-* .contract-cases demo-out dist build .pytest_cache .mypy_cache .ruff_cache
