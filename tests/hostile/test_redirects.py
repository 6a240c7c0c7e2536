"""A web server that redirects a pull to an invalid address is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fakes.webserver import WebServer

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize(
    "location",
    ["http://[", "http://[::1", "//[", "http://a:99999999/", "http://a:b/"],
)
def test_a_redirect_to_an_invalid_address_is_refused(
    web: WebServer, refused: Callable[..., None], location: str
) -> None:
    web.answer("/x.img", 302, Location=location)
    refused(web.url("/x.img"), "redirects to something that is not an http")
