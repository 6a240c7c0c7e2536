"""What users see of VirtualMachines in a stateful API server, and what they do with them. All are in the namespace shop."""

from __future__ import annotations

from typing import Any

from fakes.kubernetes_api import KubernetesApi


def status(api: KubernetesApi, name: str = "db") -> dict[str, Any]:
    found: dict[str, Any] = api.one("virtualmachines", "shop", name).get("status", {})
    return found


def condition(api: KubernetesApi, kind: str, name: str = "db") -> tuple[str, str]:
    found = [one for one in status(api, name).get("conditions", ()) if one["type"] == kind]
    return (found[0]["status"], found[0]["reason"]) if found else ("", "")


def is_running(api: KubernetesApi, name: str = "db", node: str = "") -> bool:
    found = status(api, name)
    return found.get("phase") == "Running" and (not node or found["nodeName"] == node) and len(pods(api, name)) == 1


def pods(api: KubernetesApi, name: str = "db") -> list[dict[str, Any]]:
    return [one for one in api.all("pods") if one["metadata"]["labels"].get("virtshim.io/vm") == name]


def patch(api: KubernetesApi, name: str = "db", **spec: Any) -> None:
    api.edit("virtualmachines", "shop", name, lambda one: one["spec"].update(spec))


def reasons(api: KubernetesApi) -> set[str]:
    return {one["reason"] for one in api.all("events")}


def evict(api: KubernetesApi, name: str = "db", *, dry_run: bool = False) -> tuple[int, str]:
    """Asks about the VM's pod, as `kubectl drain` does; 404 if it is gone."""
    found = [one for one in pods(api, name) if one["metadata"]["name"] == status(api, name).get("podName")]
    if not found:
        return 404, ""
    answer = api.evict("shop", found[0]["metadata"]["name"], dry_run=dry_run)
    return answer.get("code", 200), answer.get("message", "")


def are_away(api: KubernetesApi, *names: str) -> bool:
    """Asks for each VM of node n1 once more, as `kubectl drain n1` does. Whether all run on n2."""
    for name in names:
        if status(api, name).get("nodeName") == "n1":
            evict(api, name)
    return all(is_running(api, name, "n2") for name in names)
