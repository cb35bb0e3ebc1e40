"""Logs and exec: handed on to the HTTP server of the pod's node."""

import asyncio
from typing import Any

import aiohttp
from aiohttp import web

from pagefleet_localcluster.api.cluster import Cluster
from pagefleet_localcluster.api.errors import ApiError, bad_request, not_found
from pagefleet_localcluster.api.store import Name

Json = dict[str, Any]
_CONNECT_SECONDS = 5.0
_MAX_FRAME_BYTES = 4 * 2**20
_CHUNK_BYTES = 64 * 1024


def node_url(cluster: Cluster, name: Name, action: str, container: str) -> str:
    """Address of the node's endpoint for one container. Raises ApiError when pod, container or node lack."""
    stored = cluster.store.get(("", "pods"), name)
    if stored is None:
        raise not_found("pods", "", name[1])
    spec = stored.obj["spec"]
    names = [c["name"] for field in ("initContainers", "containers") for c in spec.get(field) or ()]
    mains = [c["name"] for c in spec["containers"]]
    if not container:
        default = (stored.obj["metadata"].get("annotations") or {}).get("kubectl.kubernetes.io/default-container")
        if default is None and len(mains) > 1:
            shown = " ".join(mains)
            raise bad_request(f"a container name must be specified for pod {name[1]}, choose one of: [{shown}]")
        container = default or mains[0]
    if container not in names:
        raise bad_request(f"container {container} is not valid for pod {name[1]}")
    if not spec.get("nodeName"):
        raise bad_request(f"pod {name[1]} does not have a host assigned")
    node = cluster.store.get(("", "nodes"), ("", spec["nodeName"]))
    if node is None:
        raise not_found("nodes", "", spec["nodeName"])
    status = node.obj.get("status") or {}
    address = next((a["address"] for a in status.get("addresses") or () if a["type"] == "InternalIP"), None)
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    if not address or not port:
        text = f"node {spec['nodeName']} publishes no InternalIP and port (status.addresses, status.daemonEndpoints)"
        raise ApiError(500, "InternalError", text)
    return f"http://{address}:{port}/{action}/{name[0]}/{name[1]}/{container}"


async def proxy_log(session: aiohttp.ClientSession, request: web.Request, url: str) -> web.StreamResponse:
    """Streams a container's log; the connection to the node ends with the client's."""
    query = {key: value for key, value in request.query.items() if key != "container"}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    try:
        async with session.get(url, params=query, timeout=timeout) as found:
            if found.status != 200:
                text = (await found.text())[:1000]
                if found.content_type == "application/json":
                    return web.Response(status=found.status, text=text, content_type="application/json")
                raise bad_request(text.strip())
            response = web.StreamResponse(headers={"Content-Type": "text/plain"})
            await response.prepare(request)
            async for chunk in found.content.iter_chunked(_CHUNK_BYTES):
                await response.write(chunk)
            await response.write_eof()
            return response
    except aiohttp.ClientConnectionError as error:
        raise _unreachable(url, error) from error


async def proxy_exec(session: aiohttp.ClientSession, request: web.Request, url: str) -> web.StreamResponse:
    """Joins the client's WebSocket to the node's, frame by frame, with the same subprotocol."""
    offered = [part.strip() for part in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if part.strip()]
    if "websocket" not in request.headers.get("Upgrade", "").lower():
        raise bad_request("exec needs a WebSocket upgrade (SPDY is not supported): use kubectl 1.31 or newer")
    query = [(key, value) for key, value in request.query.items() if key != "container"]
    try:
        async with session.ws_connect(
            url, params=query, protocols=offered, max_msg_size=_MAX_FRAME_BYTES, autoping=True
        ) as node:
            client = web.WebSocketResponse(
                protocols=[node.protocol] if node.protocol else (), max_msg_size=_MAX_FRAME_BYTES
            )
            await client.prepare(request)
            await _join(client, node)
            return client
    except aiohttp.WSServerHandshakeError as error:
        raise bad_request(f"the node refused exec: {error.status} {error.message}") from error
    except aiohttp.ClientConnectionError as error:
        raise _unreachable(url, error) from error


async def _join(client: web.WebSocketResponse, node: aiohttp.ClientWebSocketResponse) -> None:
    tasks = {asyncio.create_task(_pump(client, node)), asyncio.create_task(_pump(node, client))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


_Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _pump(source: _Socket, target: _Socket) -> None:
    async for message in source:
        if message.type is aiohttp.WSMsgType.BINARY:
            await target.send_bytes(message.data)
        elif message.type is aiohttp.WSMsgType.TEXT:
            await target.send_str(message.data)
        else:
            break


def _unreachable(url: str, error: Exception) -> ApiError:
    where = url.split("/")[2]
    return ApiError(500, "InternalError", f'Get "{url}": the node at {where} does not answer: {str(error)[:200]}')
