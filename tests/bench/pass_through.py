"""The bare counterpart of `virtshim proxy`: grpc.aio passes each call on, and does nothing else.

python pass_through.py LISTEN BEHIND      says "ready" when it listens on the socket, and ends with its standard input
"""

from __future__ import annotations

import asyncio
import sys

import grpc

_SIZES = [("grpc.max_receive_message_length", 16 << 20), ("grpc.max_send_message_length", 16 << 20)]


class PassThrough(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # bytes in, bytes out
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        call = self._channel.unary_unary(details.method)

        async def pass_on(request: bytes, _context: object) -> bytes:
            answer: bytes = await call(request)
            return answer

        return grpc.unary_unary_rpc_method_handler(pass_on)


async def main(listen: str, behind: str) -> None:
    async with grpc.aio.insecure_channel(f"unix:{behind}", options=_SIZES) as channel:
        server = grpc.aio.server(options=_SIZES)
        server.add_generic_rpc_handlers((PassThrough(channel),))
        server.add_insecure_port(f"unix:{listen}")
        await server.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
