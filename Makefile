# virtshim: each pod is a virtual machine. All targets want root on Debian 12 or Ubuntu.
PYTHON := .venv/bin/python
DIR ?= /var/lib/virtshim-up

.PHONY: demo test test-machine test-anywhere faults long e2e-vfio soak bench setup guest up down lint clean

demo: guest            ## a VM pod through the CRI socket, step by step
	$(PYTHON) deploy/demo.py

# What needs a processor and nothing else of the machine.
ANYWHERE := tests/unit tests/property tests/policy tests/contract/cri tests/contract/streaming

test: guest            ## every test this machine can run: those of the machine one by one, the others beside them
	$(MAKE) -j 2 --output-sync=line test-machine test-anywhere

test-machine:          ## VMs, namespaces, links, mounts; everything is set up
	$(PYTHON) -m pytest $(PYTEST_ARGS) $(addprefix --ignore=,$(ANYWHERE))

test-anywhere:         ## the rest
	$(PYTHON) -m pytest $(PYTEST_ARGS) $(ANYWHERE)

faults: guest          ## every kill point on real parts; `make test` takes a sample
	$(PYTHON) -m pytest tests/faults -s --all-faults

long: guest            ## much data through a guest: a GiB each way
	$(PYTHON) -m pytest tests/e2e/test_big_transfers.py -s --long -o faulthandler_timeout=3000

e2e-vfio: guest        ## devices of device plugins in VMs, on an emulated machine with IOMMU and SR-IOV; some minutes
	tests/vfio/machine/build.sh build/vfio
	$(PYTHON) -m pytest tests/vfio -s --strict-areas -o faulthandler_timeout=1600 $(PYTEST_ARGS)

soak: guest            ## pod cycles with random kills; SOAK_ARGS="--minutes 60"
	$(PYTHON) -m tests.soak $(SOAK_ARGS)

bench: guest           ## measures the promises; writes bench/results.json
	$(PYTHON) -m tests.bench $(BENCH_ARGS)

setup:                 ## system packages, machine preparation, .venv
	deploy/setup.sh

guest: setup           ## the small guests: build/guest.qcow2, build/null.qcow2
	deploy/guest/build.sh build/guest.qcow2
	deploy/guest/build-null.sh build/null.qcow2

up: setup              ## a node for trying things, in the foreground below DIR
	.venv/bin/virtshim up --dir $(DIR)

down:                  ## removes all that `make up` made
	.venv/bin/virtshim down --dir $(DIR)

lint: setup            ## formats, then checks style, types and import contracts
	.venv/bin/ruff format . && $(PYTHON) -m pytest tests/policy

clean:
	rm -rf build dist bench/results.json
