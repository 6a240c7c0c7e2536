"""libvirt's XML of a running VM says whether a program in the guest has the agent's port open."""

from __future__ import annotations

import pytest

from virtshim.vm.control import agent_port_state

_PORT = "<channel type='unix'><target type='virtio' name='{name}'{state}/><alias name='{alias}'/></channel>"


@pytest.mark.parametrize("state", ["connected", "disconnected"])
def test_the_state_is_that_of_the_agents_own_port(state: str) -> None:
    of_commands = _PORT.format(name="exec.0", state=" state='connected'", alias="ua-exec-0")
    of_agent = _PORT.format(name="virtshim.agent", state=f" state='{state}'", alias="ua-agent")
    assert agent_port_state(f"<domain><devices>{of_commands}{of_agent}</devices></domain>") == state


@pytest.mark.parametrize("port", ["", _PORT.format(name="virtshim.agent", state="", alias="ua-agent")])
def test_of_a_vm_that_is_off_libvirt_says_nothing(port: str) -> None:
    assert agent_port_state(f"<domain><devices>{port}</devices></domain>") == ""
