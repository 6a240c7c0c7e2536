"""The type of a secret hides it: a logged or printed record shows no password."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import re
from typing import Any

import pytest
import structlog

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.model.image import Credentials
from virtshim.system.logsetup import set_up_logging

# Fields that hold, or may hold, secrets.
SECRET = re.compile(
    r"^(envs?|environment|password|secret|auth|.*_token|tokens?|user_data(_script)?|meta_data|annotations|fetch_key)$"
)


def test_no_record_shows_a_secret_when_it_is_printed(project: Any) -> None:
    shown, hidden = [], 0
    for path in project.modules("virtshim/model"):
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


def test_registry_logins_and_requests_are_hidden_completely(capsys: pytest.CaptureFixture[str]) -> None:
    assert "hunter2" not in repr(Credentials(username="me", password="hunter2"))
    request = pb.PullImageRequest(auth=pb.AuthConfig(password="hunter2"))
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        set_up_logging("info", "json")
        structlog.get_logger("any").info("asked", request=request, all=[request])
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        structlog.reset_defaults()
    told = json.loads(capsys.readouterr().err)
    assert (told["request"], told["all"]) == ("<PullImageRequest>", ["<PullImageRequest>"])
