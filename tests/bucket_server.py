"""A server of objects for tests: parts of S3, of Google Cloud Storage, of Azure, and plain HTTP.

It keeps objects in memory, by their path, and can fail, hang up, stall and answer late on purpose.
In a test it runs on a thread; `python bucket_server.py` runs one on its own.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import re
import threading
import urllib.parse
import weakref
from collections import deque
from email.utils import formatdate
from xml.sax.saxutils import escape

EMULATOR = "/devstoreaccount1"  # the account of an emulated Azure
# A program on a busy machine sends its next request within this time.
PATIENCE_S = 0.3


def repeated(call):
    """What `call` returns, at the latest for the fifth time.

    A server on a busy machine may answer later than the short times allow that tests set.
    """
    for _ in range(4):
        with contextlib.suppress(OSError, AssertionError):
            return call()
    return call()


@dataclasses.dataclass(frozen=True)
class Fault:
    """What goes wrong with one request."""

    status: int = 0
    """Answers with this status and a text."""
    retry_after: int | None = None
    cut_at: int | None = None
    """Ends the connection after so many bytes of the body."""
    stall_at: int | None = None
    """Sends nothing more after so many bytes of the body."""
    is_reset: bool = False
    """Ends the connection without an answer."""
    is_silent: bool = False
    """Never answers."""
    reads: int | None = None
    """Reads so many bytes of the request's body; then it ends the connection, or is silent."""
    is_done: bool = False
    """Does what was asked for and ends the connection without an answer."""
    blank_s: float = 0
    """Sends white space for so long, after the head of the answer to a request that writes."""
    only: str = ""
    """Waits for a request of which `METHOD path?query` matches this pattern."""


@dataclasses.dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Object:
    data: bytes
    tag: str
    written: float
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)


class BucketServer:
    """Serves `objects` until its `with` block ends."""

    def __init__(self, port=0, *, latency_s=0.0, has_ranges=True, has_tags=True, page_len=1000):
        self.objects = {}
        self.faults = deque()
        """One for each of the next requests of an object; `None` for one that succeeds."""
        self.always = None
        """What goes wrong with each request of an object."""
        self.requests = []
        self.uploads = {}
        """The parts of uploads that are not complete, by path and identifier."""
        self.takes_conditions = True
        self.num_active = self.max_active = 0
        self._tasks = set()
        self._transports = weakref.WeakSet()
        self.keeps = 0
        """None is answered while fewer are in flight, until none has come for `patience_s`."""
        self.patience_s = PATIENCE_S
        self.port, self.latency_s, self.page_len = port, latency_s, page_len
        self.has_ranges, self.has_tags = has_ranges, has_tags
        self.num_bytes_asked = 0  # of parts of objects
        self._clock = itertools.count(1_700_000_000)

    def put(self, path, data, metadata=None):
        tag = f'"{hash(data) & (1 << 64) - 1:x}"'  # which Python keeps with the bytes
        self.objects[path] = Object(data, tag, next(self._clock), metadata or {})

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        started = threading.Event()
        self._loop = asyncio.new_event_loop()

        async def run():
            self._stop = asyncio.Event()
            server = await self.start()
            started.set()
            await self._stop.wait()
            server.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[run()])
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.run_until_complete(self._end_late_connections())
        self._loop.close()

    async def _end_late_connections(self):
        """A connection accepted in the last moment is served some turns of the loop later."""
        await asyncio.sleep(0.01)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for transport in self._transports:  # with data that nobody reads, it would not close
            if transport.get_write_buffer_size():  # one that has closed cannot be aborted
                transport.abort()
        await asyncio.sleep(0)

    async def start(self):
        server = await asyncio.start_server(self._accepted, "127.0.0.1", self.port, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _accepted(self, reader, writer):
        """Serves a connection; it is closed also if it ends before it was served at all."""
        self._transports.add(writer.transport)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, target, _ = head[0].split(" ")
                path, _, query = target.partition("?")
                pairs = (line.split(": ", 1) for line in head[1:] if line)
                headers = {name.lower(): value for name, value in pairs}
                request = Request(
                    method,
                    urllib.parse.unquote(path).removeprefix(EMULATOR),
                    dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
                    headers,
                )
                self.requests.append(request)
                self.num_active += 1
                self.max_active = max(self.max_active, self.num_active)
                self._last_came = self._loop.time()
                try:
                    if self.latency_s:
                        await asyncio.sleep(self.latency_s)
                    await self._hold()
                    fault = self._fault(request)
                    length = int(headers.get("content-length", 0))
                    if fault.reads is not None:
                        await reader.readexactly(min(length, fault.reads))
                        if fault.is_silent:
                            await asyncio.sleep(3600)
                        writer.transport.abort()
                        return
                    body = await reader.readexactly(length)
                    if fault.is_done:
                        self._changed(request, body)
                        writer.transport.abort()
                        return
                    if not await self._answer(request, body, fault, writer):
                        return
                finally:
                    self.num_active -= 1
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _hold(self):
        """Waits for requests that are to be in flight at the same time as this one."""
        while self.num_active < self.keeps:
            if self._loop.time() > self._last_came + self.patience_s:
                break
            await asyncio.sleep(0.01)

    def _fault(self, request):
        if _lists(request):
            return Fault()
        only = (self.faults[0] or Fault()).only if self.faults else ""
        told = f"{request.method} {request.path}?{urllib.parse.urlencode(request.query)}"
        if only and not re.search(only, told):
            return Fault()
        return (self.faults.popleft() if self.faults else self.always) or Fault()

    async def _answer(self, request, body, fault, writer):  # noqa: PLR0911 - one for each answer
        """Answers `request`; returns whether the connection stays open."""
        if _lists(request):
            return await self._send(writer, 200, self._listing(request), {})
        if fault.is_reset:
            writer.transport.abort()
            return False
        if fault.is_silent:
            await asyncio.sleep(3600)
        if fault.status:
            extra = {} if fault.retry_after is None else {"Retry-After": str(fault.retry_after)}
            text = f"<Error><Message>refused on purpose: {fault.status}</Message></Error>"
            return await self._send(writer, fault.status, text.encode(), extra)
        if request.method in {"PUT", "POST", "DELETE"}:
            return await self._send(writer, *self._changed(request, body), fault=fault)
        found = self.objects.get(request.path)
        if found is None:
            text = b"<Error><Code>NoSuchKey</Code></Error>"
            return await self._send(writer, 404, b"" if request.method == "HEAD" else text, {})
        headers = {"Last-Modified": formatdate(found.written, usegmt=True)}
        if self.has_tags:
            headers["ETag"] = found.tag
        headers |= found.metadata
        wanted = request.headers.get("if-match")
        if wanted is not None and wanted != found.tag:
            return await self._send(writer, 412, b"<Error>PreconditionFailed</Error>", headers)
        size = len(found.data)
        if request.method == "HEAD":
            return await self._send(writer, 200, b"", headers, length=size)
        asked = request.headers.get("range") or request.headers.get("x-ms-range")
        if asked is None or not self.has_ranges:
            return await self._send(writer, 200, found.data, headers, fault=fault)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin = int(first) if first else max(size - int(last), 0)
        end = min(int(last) + 1, size) if first and last else size
        if begin >= end:
            return await self._send(writer, 416, b"<Error>InvalidRange</Error>", headers)
        self.num_bytes_asked += end - begin
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        return await self._send(writer, 206, found.data[begin:end], headers, fault=fault)

    def _changed(self, request, body):  # noqa: PLR0911 - one for each request
        """Does what a request to write asks for; returns the status, the body and the headers."""
        path, query = request.path, request.query
        metadata = {name: text for name, text in request.headers.items() if "-meta-" in name}
        key = path, query.get("uploadId", "")
        is_part = "partNumber" in query or query.get("comp") == "block"
        if query.get("comp") == "batch":  # Azure removes many at a time
            names = re.findall(r"DELETE (\S+) HTTP", body.decode())
            names = [urllib.parse.unquote(name).removeprefix(EMULATOR) for name in names]
            found = [self.objects.pop(name, None) for name in names]
            parts = "".join(
                f"--b\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                f"HTTP/1.1 {202 if one else 404} Status\r\n\r\n\r\n"
                for number, one in enumerate(found)
            )
            kind = {"Content-Type": "multipart/mixed; boundary=b"}
            return 202, f"{parts}--b--\r\n".encode(), kind
        if request.method == "DELETE":
            if key[1]:
                return (204 if self.uploads.pop(key, None) else 404), b"", {}
            return (204 if self.objects.pop(path, None) else 404), b"", {}
        if "uploads" in query:
            key = path, f"upload-{next(self._clock)}"
            self.uploads[key] = {"metadata": metadata}
            name = f"<UploadId>{key[1]}</UploadId>"
            text = f"<InitiateMultipartUploadResult>{name}</InitiateMultipartUploadResult>"
            return 200, text.encode(), {}
        if is_part:
            if key[1] and key not in self.uploads:
                return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
            part = query.get("partNumber") or query["blockid"]
            self.uploads.setdefault(key, {"metadata": {}})[part] = body
            return 201, b"", {"ETag": f'"{part}"'}
        refuses = request.headers.get("if-none-match") == "*"
        refuses |= request.headers.get("x-goog-if-generation-match") == "0"
        if refuses and not self.takes_conditions:
            return 501, b"<Error><Code>NotImplemented</Code></Error>", {}
        if refuses and path in self.objects:
            return 412, b"<Error><Code>PreconditionFailed</Code></Error>", {}
        if key[1] or query.get("comp") == "blocklist":
            if key not in self.uploads and not key[1]:
                return 400, b"<Error><Code>InvalidBlockList</Code></Error>", {}
            if key not in self.uploads:
                return 404, b"<Error><Code>NoSuchUpload</Code></Error>", {}
            parts = self.uploads.pop(key)
            metadata = metadata or parts["metadata"]
            text = body.decode()
            names = re.findall(r"<(?:PartNumber|Uncommitted)>([^<]*)<", text)
            body = b"".join(parts[name] for name in names)
        self.put(path, body, metadata)
        tag = self.objects[path].tag
        name = "CompleteMultipartUploadResult"
        text = f"<{name}><ETag>{escape(tag)}</ETag></{name}>"
        return 201 if not key[1] else 200, text.encode(), {"ETag": tag}

    async def _send(self, writer, status, body, headers, *, length=None, fault=None):
        num_blank = 0 if fault is None else int(fault.blank_s * 10)
        length = num_blank + len(body) if length is None else length
        lines = [f"HTTP/1.1 {status} Status"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"Content-Length: {length}", "", ""]
        head = "\r\n".join(lines).encode()
        for _ in range(num_blank):
            writer.write(head + b" ")
            head = b""
            await writer.drain()
            await asyncio.sleep(0.1)
        # In one write with the head, or the client would be woken for each of the two.
        if fault is not None and fault.cut_at is not None:
            writer.write(head + body[: fault.cut_at])
            await writer.drain()
            return False
        if fault is not None and fault.stall_at is not None:
            writer.write(head + body[: fault.stall_at])
            await writer.drain()
            await asyncio.sleep(3600)
        writer.write(head + body)
        await writer.drain()
        return True

    def _listing(self, request):
        bucket = "/" + request.path.strip("/") + "/"
        prefix = bucket + request.query.get("prefix", "")
        names = sorted(path for path in self.objects if path.startswith(prefix))
        token = "marker" if "comp" in request.query else "continuation-token"
        begin = int(request.query.get(token) or 0)
        page = names[begin : begin + self.page_len]
        following = str(begin + len(page)) if begin + len(page) < len(names) else ""
        if "comp" in request.query:
            return self._azure_listing(bucket, page, following)
        entries = "".join(
            f"<Contents><Key>{escape(name.removeprefix(bucket))}</Key>"
            f"<Size>{len(self.objects[name].data)}</Size><ETag>{self.objects[name].tag}</ETag>"
            "<LastModified>2023-11-14T22:13:20.000Z</LastModified></Contents>"
            for name in page
        )
        more = f"<NextContinuationToken>{following}</NextContinuationToken>" if following else ""
        is_cut = str(bool(following)).lower()
        return (
            f"<ListBucketResult><KeyCount>{len(page)}</KeyCount><IsTruncated>{is_cut}"
            f"</IsTruncated>{more}{entries}</ListBucketResult>"
        ).encode()

    def _azure_listing(self, bucket, page, following):
        blobs = "".join(
            f"<Blob><Name>{escape(name.removeprefix(bucket))}</Name><Properties>"
            "<Last-Modified>Tue, 14 Nov 2023 22:13:20 GMT</Last-Modified>"
            f"<Content-Length>{len(self.objects[name].data)}</Content-Length>"
            f"<Content-Type>x</Content-Type><Etag>{self.objects[name].tag}</Etag>"
            "</Properties></Blob>"
            for name in page
        )
        return (
            f"<EnumerationResults><Blobs>{blobs}</Blobs><NextMarker>{following}</NextMarker>"
            "</EnumerationResults>"
        ).encode()


def _lists(request):
    return "list-type" in request.query or request.query.get("comp") == "list"


def main():
    """Serves one object under many names, and prints the port.

    For each line of input it prints the most requests that were active at a time, and their number.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--latency-ms", type=float, default=0)
    parser.add_argument("--keeps", type=int, default=0)
    options = parser.parse_args()
    server = BucketServer(latency_s=options.latency_ms / 1000)
    server.keeps, server.patience_s = options.keeps, 1
    with open(options.file, "rb") as file:  # noqa: PTH123
        server.put("/bucket/0", file.read())
    for number in range(options.count):
        server.objects[f"/bucket/data/{number:05}"] = server.objects["/bucket/0"]
    with server, contextlib.suppress(EOFError):
        print(server.port, flush=True)
        while True:
            input()
            print(server.max_active, len(server.requests), flush=True)


if __name__ == "__main__":
    main()
