"""The example of hooks and probes does what its comments say."""

from pathlib import Path

import yaml

from virtshim.annotations.parse import parse_vm_options

POD = yaml.safe_load(Path(__file__, "../../../../deploy/pod-with-hooks.yaml").resolve().read_text())


def test_no_probe_kills_a_guest_that_boots() -> None:
    (container,) = POD["spec"]["containers"]
    assert container["lifecycle"]["postStart"].keys() == {"exec"}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 300
    assert {"livenessProbe", "readinessProbe"} < container.keys()


def test_virtshim_accepts_the_examples_annotations() -> None:
    parse_vm_options(POD["metadata"]["annotations"])
