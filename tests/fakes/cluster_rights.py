"""The rights of service accounts as the manifests in deploy/ give them: RBAC, then the ValidatingAdmissionPolicies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from cel_expr_python import cel  # type: ignore[import-untyped]
from fakes import certificate_requests
from fakes.kubernetes_api import Asked, Document, Refused

_CLUSTER = Path(__file__).resolve().parents[2] / "deploy/kustomize/overlays/cluster"
_ENVIRONMENT = cel.NewEnv(variables=dict.fromkeys(("object", "oldObject", "request"), cel.Type.DYN))
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
_OPERATIONS = {"POST": "CREATE", "PATCH": "UPDATE", "PUT": "UPDATE", "DELETE": "DELETE"}

Right = tuple[str, str]


class ShippedRights:
    """`extra`: what the API server knows of a user, or of one of its tokens, besides the name. `components`: optional ones of the
    overlay. `used`: the rights that have been needed, as (verb, resource), by user."""

    def __init__(self, extra: dict[str, dict[str, list[str]]] | None = None, components: tuple[str, ...] = ()) -> None:
        self.extra = extra or {}
        self.used: dict[str, set[Right]] = {}
        self.refused: list[str] = []
        files = [file for one in ("", *components) for file in sorted((_CLUSTER / one).glob("*.yaml"))]
        self.objects = [one for file in files for one in yaml.safe_load_all(file.read_text()) if one]
        self._programs: dict[str, Any] = {}

    def authorize(self, asked: Asked) -> None:
        verb = _VERBS.get(asked.method) or ("get" if asked.name else "watch" if "watch" in asked.query else "list")
        resource = f"{asked.resource.plural}/{asked.sub}" if asked.sub else asked.resource.plural
        self._require(asked, verb, asked.resource.group, resource, asked.name)

    def _require(self, asked: Asked, verb: str, group: str, resource: str, name: str) -> None:
        self.used.setdefault(asked.user, set())
        for rule in self.rules(asked.user, asked.namespace):
            names = rule.get("resourceNames")
            is_named = names is None or name in names
            if is_named and group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                self.used[asked.user].add((verb, resource))
                return
        self._refuse(f'User "{asked.user}" cannot {verb} resource "{resource}" in namespace "{asked.namespace}"')

    def admit(self, asked: Asked, before: Document | None, after: Document | None) -> None:
        if asked.resource.kind == certificate_requests.KIND and asked.sub and before is not None:
            signer = before["spec"]["signerName"]
            self._require(asked, certificate_requests.VERBS[asked.sub], asked.resource.group, "signers", signer)
        for policy in self._of_kind("ValidatingAdmissionPolicy"):
            if _is_about(policy, asked):
                self._validate(policy, asked, before, after)

    def granted(self, user: str) -> set[Right]:
        spaces = {one["metadata"].get("namespace", "") for one in self._of_kind("ClusterRoleBinding", "RoleBinding")}
        rules = [rule for one in spaces for rule in self.rules(user, one)]
        return {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}

    def rules(self, user: str, namespace: str) -> Iterable[Document]:
        for binding in self._of_kind("ClusterRoleBinding", "RoleBinding"):
            own = binding["metadata"].get("namespace", "")
            subjects = [f"system:serviceaccount:{one['namespace']}:{one['name']}" for one in binding["subjects"]]
            if user in subjects and own in ("", namespace):
                role = binding["roleRef"]
                space = own if role["kind"] == "Role" else ""
                (found,) = [
                    one
                    for one in self._of_kind(role["kind"])
                    if (one["metadata"].get("namespace", ""), one["metadata"]["name"]) == (space, role["name"])
                ]
                yield from found["rules"]

    def _of_kind(self, *kinds: str) -> list[Document]:
        return [one for one in self.objects if one["kind"] in kinds]

    def _validate(self, policy: Document, asked: Asked, before: Document | None, after: Document | None) -> None:
        request = {
            "operation": _OPERATIONS[asked.method],
            "name": asked.name,
            "namespace": asked.namespace,
            "subResource": asked.sub,
            "userInfo": {
                "username": asked.user,
                "extra": self.extra.get(asked.token) or self.extra.get(asked.user, {}),
            },
        }
        data = {"object": after, "oldObject": before, "request": request}
        variables = {one["name"]: one["expression"] for one in policy["spec"].get("variables", ())}
        conditions = policy["spec"].get("matchConditions", ())
        if not all(self._is_true(one["expression"], variables, data) for one in conditions):
            return
        for one in policy["spec"]["validations"]:
            if not self._is_true(one["expression"], variables, data):
                policy_name = policy["metadata"]["name"]
                words = f"ValidatingAdmissionPolicy '{policy_name}' with binding '{policy_name}' denied request"
                message = f'{asked.resource.plural} "{asked.name}" is forbidden: {words}: {one["message"]}'
                self._refuse(message, one.get("reason", "Invalid"))

    def _is_true(self, expression: str, variables: dict[str, str], data: dict[str, Any]) -> bool:
        while (after := re.sub(r"variables\.(\w+)", lambda name: f"({variables[name[1]]})", expression)) != expression:
            expression = after
        if expression not in self._programs:
            self._programs[expression] = _ENVIRONMENT.compile(expression)
        return self._programs[expression].eval(data=data).value() is True  # an error refuses, as failurePolicy: Fail

    def _refuse(self, message: str, reason: str = "Forbidden") -> None:
        self.refused.append(message)
        raise Refused({"Forbidden": 403, "Invalid": 422}[reason], reason, message)


def _is_about(policy: Document, asked: Asked) -> bool:
    resource = f"{asked.resource.plural}/{asked.sub}" if asked.sub else asked.resource.plural
    return any(
        asked.resource.group in rule["apiGroups"]
        and resource in rule["resources"]
        and _OPERATIONS[asked.method] in rule["operations"]
        for rule in policy["spec"]["matchConstraints"]["resourceRules"]
    )
