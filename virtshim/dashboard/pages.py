"""The paths of the dashboard and their answers.

All paths are below a host name and a path prefix that nobody can guess, and that are used for only one run. The host name is a
separate origin, so nobody can prepare data that a browser keeps for it (above all service workers), or find that data later. The
path prefix protects the cookie, which does not depend on the port, in case a DNS resolver has seen the host name.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from aiohttp import WSMsgType, web

from criproto.runtime_v1 import api_pb2 as pb
from virtshim.dashboard import streams, views
from virtshim.dashboard.login import LOGIN_COOKIE, Sessions, add_security_headers, login_middleware
from virtshim.dashboard.node_calls import NodeCalls
from virtshim.dashboard.readings import SPANS
from virtshim.dashboard.watch import NodeWatch
from virtshim.guest.operation import Action
from virtshim.model.errors import Kind, NotFound, ShimError, Unavailable

# Seconds between pings on a page's WebSocket, to detect a browser that has gone.
_HEARTBEAT: Final = 20.0
# Bytes of one message from a page, e.g. text that is pasted into a console.
_MESSAGE: Final = 1 << 20
# How many pods' starts are remembered.
_STARTS: Final = 500
_STATUS: Final = {Kind.NOT_FOUND: 404, Kind.INVALID: 400, Kind.FAILED_PRECONDITION: 409, Kind.UNAVAILABLE: 503}
# The placeholder in index.html for `Place.run`.
_RUN: Final = "@RUN@"
_IDS: Final = "{id:[0-9A-Za-z_.-]{1,128}}"
_ACTIONS: Final = "{action:pause|resume|reset|reboot}"
# Threads for actions. A stop may take half a minute, and must not keep a thread from the looks at the node.
_ACTING: Final = 8

# The files of the web page: in the installed package, or in the build directory of a source tree.
_PAGE: Final = "index.html"
_HERE: Final = Path(__file__).resolve().parent

T = TypeVar("T")


def assets_directory() -> Path:
    """The directory of the page's files. Raises Unavailable if they were never built."""
    for directory in (_HERE / "dist", _HERE.parent.parent / "build/dashboard/dist"):
        if (directory / _PAGE).is_file():
            return directory
    raise Unavailable(
        "this installation has no dashboard, because its web page was not built. In the source tree, run "
        "make dashboard-assets (it needs npm), then install again"
    )


@dataclass(frozen=True, slots=True)
class Place:
    """The address of one run of the dashboard. `host`: a name that means loopback (RFC 6761). `path` begins with a slash. `run`:
    a secret in the page, which lets the page recognize its own server when it reconnects."""

    host: str
    path: str
    run: str = field(repr=False)

    @classmethod
    def of_this_run(cls) -> Self:
        return cls(
            f"virtshim-{secrets.token_hex(16)}.localhost", f"/{secrets.token_urlsafe(16)}", secrets.token_urlsafe(16)
        )


class Pages:
    def __init__(self, node: NodeCalls, watch: NodeWatch, sessions: Sessions, assets: Path, place: Place) -> None:
        self._node = node
        self._watch = watch
        self._sessions = sessions
        self._assets = assets
        self._place = place
        self._prefix = place.path
        self._starts: dict[str, list[dict[str, Any]]] = {}
        self._open: set[web.WebSocketResponse] = set()
        self._actors = ThreadPoolExecutor(_ACTING, "actions")

    def application(self) -> web.Application:
        app = web.Application(
            middlewares=[login_middleware(self._sessions, self._place.host, f"{self._prefix}/login")],
            client_max_size=1 << 16,
        )
        app.on_response_prepare.append(add_security_headers)
        app.on_shutdown.append(self._say_that_it_is_over)
        app.on_cleanup.append(self._end_actors)
        app.router.add_get(f"{self._prefix}/login", self._login, allow_head=False)
        app.router.add_post(f"{self._prefix}/logout", self._logout)
        app.router.add_get(f"{self._prefix}/live", self._live)
        app.router.add_get(f"{self._prefix}/pods/{_IDS}", self._pod)
        app.router.add_get(f"{self._prefix}/pods/{_IDS}/graph", self._graph)
        app.router.add_get(f"{self._prefix}/pods/{_IDS}/screen", self._screen)
        app.router.add_get(f"{self._prefix}/vms/{_IDS}/console", self._console)
        app.router.add_get(f"{self._prefix}/vms/{_IDS}/screenshot", self._screenshot)
        app.router.add_post(f"{self._prefix}/vms/{_IDS}/{_ACTIONS}", self._act)
        app.router.add_post(f"{self._prefix}/pods/{_IDS}/stop", self._stop)
        app.router.add_get(f"{self._prefix}/", self._index)
        app.router.add_get(self._prefix + "/assets/{name:[0-9A-Za-z_.-]{1,80}}", self._asset)
        return app

    # --- sessions

    async def _login(self, request: web.Request) -> web.StreamResponse:
        secret = self._sessions.exchange(request.query.get("token", ""))
        if secret is None:
            raise web.HTTPForbidden(
                text="this URL was already used, or a newer one was printed; press Enter in the terminal of "
                "`virtshim dashboard`\n"
            )
        answer = web.Response(status=303, headers={"Location": f"{self._prefix}/"})
        answer.set_cookie(LOGIN_COOKIE, secret, path=f"{self._prefix}/", httponly=True, samesite="Strict")
        return answer

    async def _logout(self, request: web.Request) -> web.StreamResponse:
        self._sessions.end(request.cookies[LOGIN_COOKIE])
        await self._close_all(1001, "somebody signed out")
        answer = web.Response(status=204)
        answer.del_cookie(LOGIN_COOKIE, path=f"{self._prefix}/")
        return answer

    # --- files

    async def _index(self, _request: web.Request) -> web.StreamResponse:
        page = (self._assets / _PAGE).read_text()
        return web.Response(text=page.replace(_RUN, self._place.run), content_type="text/html")

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        path = self._assets / request.match_info["name"]
        if path.name.startswith(".") or not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path)

    # --- data of the node

    async def _pod(self, request: web.Request) -> web.StreamResponse:
        wanted = request.match_info["id"]
        try:
            pod = await asyncio.to_thread(self._node.pod_status, wanted)
            vms = [vm async for vm in self._vms(wanted)]
        except ShimError as exc:
            return _refused(exc)
        return web.json_response(views.detail(pod, vms, await asyncio.to_thread(self._start, wanted)))

    async def _vms(self, pod: str) -> AsyncIterator[pb.ContainerStatusResponse]:
        """The status of the pod's VMs, without VMs that have just gone."""
        for vm in self._watch.vms_of(pod):
            try:
                found = await asyncio.to_thread(self._node.vm_status, vm)
            except NotFound:
                continue
            yield found

    def _start(self, pod: str) -> list[dict[str, Any]]:
        """The phases of the pod's start. They are remembered here, because a restarted virtshim no longer knows them."""
        if told := views.phases(self._node.start_up(pod)):
            self._starts.pop(pod, None)
            self._starts[pod] = told
            while len(self._starts) > _STARTS:
                del self._starts[next(iter(self._starts))]
        return self._starts.get(pod, [])

    async def _graph(self, request: web.Request) -> web.StreamResponse:
        span = request.query.get("span", "")
        if span not in map(str, SPANS):
            raise web.HTTPBadRequest(text=f"span: must be one of {', '.join(map(str, SPANS))}\n")
        return web.json_response(self._watch.graph(request.match_info["id"], int(span)))

    # --- actions

    async def _act(self, request: web.Request) -> web.StreamResponse:
        action, vm = Action(request.match_info["action"]), request.match_info["id"]
        return await self._told(lambda: self._node.act(action, vm))

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        pod = request.match_info["id"]
        return await self._told(lambda: self._node.stop(pod))

    async def _told(self, act: Callable[[], str]) -> web.StreamResponse:
        try:
            return web.json_response({"message": await self._acted(act)})
        except ShimError as exc:
            return _refused(exc)

    async def _screenshot(self, request: web.Request) -> web.StreamResponse:
        vm = request.match_info["id"]
        try:
            picture = await self._acted(lambda: self._node.screenshot(vm))
        except ShimError as exc:
            return _refused(exc)
        return web.Response(body=picture, content_type="image/png")

    async def _acted(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._actors, act)

    async def _end_actors(self, _app: web.Application) -> None:
        self._actors.shutdown(wait=False, cancel_futures=True)

    # --- streams

    async def _live(self, request: web.Request) -> web.StreamResponse:
        async with self._socket(request) as page:
            await page.send_json({"run": self._place.run})
            with self._watch.listening() as listener:
                gone = asyncio.ensure_future(_silence(page))
                overrun = asyncio.ensure_future(listener.overrun.wait())
                try:
                    while True:
                        message = asyncio.ensure_future(listener.get())
                        await asyncio.wait({message, gone, overrun}, return_when=asyncio.FIRST_COMPLETED)
                        if gone.done() or overrun.done():
                            message.cancel()
                            break
                        await page.send_json(message.result())
                finally:
                    gone.cancel()
                    overrun.cancel()
        return page

    async def _console(self, request: web.Request) -> web.StreamResponse:
        async with self._socket(request) as page:
            vm = request.match_info["id"]
            await streams.console(page, lambda: self._node.console(vm), lambda: self._node.earlier_output(vm))
        return page

    async def _screen(self, request: web.Request) -> web.StreamResponse:
        async with self._socket(request) as page:
            pod = request.match_info["id"]
            await streams.screen(page, lambda: self._screen_url(pod))
        return page

    def _screen_url(self, pod: str) -> str:
        """Refuses a pod without a screen: its port 5900 would be whatever its guest serves there."""
        pods = self._node.look().pods  # the watch may not have looked since the pod was made
        if not any(one.has_screen for one in pods if one.id == pod):
            raise NotFound('this VM has no screen; set the annotation virtshim.io/vnc: "true" on its pod')
        return self._node.screen_url(pod)

    @contextlib.asynccontextmanager
    async def _socket(self, request: web.Request) -> AsyncIterator[web.WebSocketResponse]:
        page = web.WebSocketResponse(heartbeat=_HEARTBEAT, max_msg_size=_MESSAGE)
        await page.prepare(request)
        self._open.add(page)
        try:
            with contextlib.suppress(ConnectionError):
                yield page
        finally:
            self._open.discard(page)
            await page.close()

    async def _say_that_it_is_over(self, _app: web.Application) -> None:
        """A page of this run never finds a server again: the next run has another name."""
        await self._close_all(streams.OVER, "the dashboard has ended")

    async def _close_all(self, code: int, why: str) -> None:
        for page in list(self._open):
            await streams.close(page, code, why)


def _refused(why: ShimError) -> web.Response:
    return web.json_response({"error": str(why)}, status=_STATUS.get(why.kind, 502))


async def _silence(page: web.WebSocketResponse) -> None:
    """Waits until the page has gone. Ignores its messages."""
    async for message in page:
        if message.type is WSMsgType.ERROR:
            return
