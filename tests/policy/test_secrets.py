"""What is secret is hidden by its type: whoever logs, or prints, a record shows no password by it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.domain.image import Credentials
from virtshim.logsetup import _plain

# Fields that hold, or may hold, what nobody else is to know.
SECRET = re.compile(
    r"^(envs?|environment|password|secret|auth|.*_token|tokens?|user_data(_script)?|meta_data|annotations|fetch_key)$"
)


def test_no_record_shows_a_secret_when_it_is_printed(project: Any) -> None:
    shown, hidden = [], 0
    for path in project.modules("virtshim/domain"):
        name = ".".join(path.relative_to(project.root).with_suffix("").parts).removesuffix(".__init__")
        for cls in vars(importlib.import_module(name)).values():
            if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls) and cls.__module__ == name):
                continue
            if not cls.__dataclass_params__.repr or ("__repr__" in vars(cls) and cls is Credentials):  # type: ignore[attr-defined]
                continue
            for field in dataclasses.fields(cls):
                if SECRET.fullmatch(field.name):
                    hidden += not field.repr
                    shown += [f"{name}.{cls.__name__}.{field.name}"] if field.repr else []
    assert shown == []
    assert hidden > 5


def test_registry_logins_and_requests_are_hidden_whole() -> None:
    assert "hunter2" not in repr(Credentials(username="me", password="hunter2"))
    request = pb.PullImageRequest(auth=pb.AuthConfig(password="hunter2"))
    assert _plain({"request": request, "list": [request]}, 5) == {
        "request": "<PullImageRequest>",
        "list": ["<PullImageRequest>"],
    }
