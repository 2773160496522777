"""HTTP endpoints of the process: /healthz and /readyz for the kubelet, /metrics for authorized callers."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import subprocess
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from rljob_operator.kube.client import ApiClient
from rljob_operator.kube.errors import ApiError
from rljob_operator.kube.resources import SUBJECT_ACCESS_REVIEWS, TOKEN_REVIEWS, Object, Resource
from rljob_operator.kube.watch import Reflector
from rljob_operator.metrics import REGISTRY, WATCH_AGE_SECONDS

_OUTAGE_FACTOR = 10.0


class Health:
    """State behind the probes. A standby replica has no watches, and is healthy."""

    def __init__(self, stale_watch_seconds: float) -> None:
        self._stale_watch_seconds = stale_watch_seconds
        self._watches: tuple[Reflector, ...] = ()
        self.ready = False
        """This replica leads with full caches, or knows that another replica leads."""

    def standing_by(self) -> None:
        """Report ready: another replica leads."""
        self.ready = True

    def watching(self, watches: Iterable[Reflector]) -> None:
        """Monitor these watches from now on."""
        self._watches = tuple(watches)
        for watched in self._watches:
            WATCH_AGE_SECONDS.labels(watched.resource.plural).set_function(partial(self._age, watched.resource))

    def problem(self) -> str | None:
        """Reason to replace the process; None if it is healthy.

        If all watches are silent, the API server is away, and a new process would not reach it either: that is a
        reason only after a long time, in case that credentials or connections of this process are the cause.
        """
        limit_seconds = self._stale_watch_seconds
        if all(watched.age_seconds > limit_seconds for watched in self._attended()):
            limit_seconds *= _OUTAGE_FACTOR
        return self._silence(limit_seconds)

    def not_ready(self) -> str | None:
        """Reason why this replica does not do its part; None if it does."""
        if not self.ready:
            return "the caches are not filled, and no other replica is known to lead"
        return self._silence(self._stale_watch_seconds)

    def _attended(self) -> Iterator[Reflector]:
        return (watched for watched in self._watches if not watched.is_unattended)

    def _silence(self, limit_seconds: float) -> str | None:
        """Message about the first watch that has been silent for longer."""
        silent = (watched for watched in self._attended() if watched.age_seconds > limit_seconds)
        return next(map(self._described, silent), None)

    def _described(self, watched: Reflector) -> str:
        return (
            f"the watch of {watched.resource.plural} has been silent for {watched.age_seconds:.0f} s; "
            f"expected a message within {self._stale_watch_seconds:.0f} s"
        )

    def _age(self, resource: Resource) -> float:
        return max((watched.age_seconds for watched in self._attended() if watched.resource is resource), default=0.0)


def probes_app(health: Health) -> web.Application:
    """Both probes. Any answer shows that the event loop runs."""

    async def answer(find_problem: Callable[[], str | None], _: web.Request) -> web.Response:
        problem = find_problem()
        return web.Response(status=503, text=f"{problem}\n") if problem else web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/healthz", partial(answer, health.problem))
    app.router.add_get("/readyz", partial(answer, health.not_ready))
    return app


@asynccontextmanager
async def serve(app: web.Application, port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    """Serve on all addresses of the pod."""
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, port=port, ssl_context=tls).start()
        yield
    finally:
        await runner.cleanup()


_PATH = "/metrics"
_REMEMBERED_SECONDS = 60.0
_MAX_REMEMBERED = 1024
_MAX_REVIEWS_OF_UNKNOWN = 4
_MAX_REVIEWS = 8
"""Concurrent reviews."""

MayRead = Callable[[str], Awaitable[int]]
"""Maps a bearer token to an HTTP status: 200, 401, 403, or 503 if there is no answer yet."""


class TokenCheck:
    """Authorizes by TokenReview and SubjectAccessReview. Answers are cached for a minute, by the hash of the token.

    Everyone who reaches the port can cause a review, so few run at a time; beyond that, callers get 503. Accepted
    tokens have reviews and a cache of their own, so that unknown callers cannot keep Prometheus out.
    """

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        """Time at which each answer expires."""
        self._refused: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._reviews = 0

    async def __call__(self, token: str) -> int:
        if not token:
            return 401
        digest = hashlib.sha256(token.encode()).digest()
        if self._accepted.get(digest, 0.0) > time.monotonic():
            return 200
        expires, answer = self._refused.get(digest, (0.0, 0))
        if expires > time.monotonic():
            return answer
        if self._reviews >= (_MAX_REVIEWS if digest in self._accepted else _MAX_REVIEWS_OF_UNKNOWN):
            return 503
        self._reviews += 1
        try:
            answer = await self._ask(token)
        except ApiError:
            return 503
        finally:
            self._reviews -= 1
        self._remember(digest, answer)
        return answer

    def _remember(self, digest: bytes, answer: int) -> None:
        expires = time.monotonic() + _REMEMBERED_SECONDS
        self._accepted.pop(digest, None)
        if answer == 200:
            self._accepted[digest] = expires
        else:
            self._refused[digest] = (expires, answer)
            self._refused.move_to_end(digest)
        for known in (self._accepted, self._refused):
            if len(known) > _MAX_REMEMBERED:
                known.popitem(last=False)

    async def _ask(self, token: str) -> int:
        found = await self._review(TOKEN_REVIEWS, {"token": token})
        if not found.get("authenticated"):
            return 401
        user = found.get("user") or {}
        caller = {"user": user.get("username")} | {name: user.get(name) for name in ("uid", "groups", "extra")}
        access = {"nonResourceAttributes": {"path": _PATH, "verb": "get"}}
        found = await self._review(SUBJECT_ACCESS_REVIEWS, caller | access)
        return 200 if found.get("allowed") else 403

    async def _review(self, resource: Resource, spec: Object) -> Object:
        """Create the review and return its status."""
        review = {"apiVersion": resource.api_version, "kind": resource.kind, "spec": spec}
        return (await self._client.create(resource, review)).get("status") or {}


def metrics_app(may_read: MayRead | None) -> web.Application:
    """The endpoint /metrics, open to everyone if `may_read` is None."""

    async def metrics(request: web.Request) -> web.Response:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        code = await may_read(token.strip() if scheme.lower() == "bearer" else "") if may_read else 200
        if code != 200:
            return web.Response(status=code, text=_REFUSALS[code])
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get(_PATH, metrics)
    return app


_REFUSALS = {
    401: "expected a bearer token that the API server accepts\n",
    403: "the caller may not `get /metrics`; bind a ClusterRole with nonResourceURLs: [/metrics] to it\n",
    503: "the API server did not answer, or too many callers are being authorized; try again\n",
}


# --- Certificates ---


_log = structlog.get_logger(__name__)

CERTIFICATE_FILE, KEY_FILE = "tls.crt", "tls.key"
"""File names of a Secret of type kubernetes.io/tls, as cert-manager writes it."""

_CHECK_EVERY_SECONDS = 10.0
_SELF_SIGNED = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", "3650", "-subj", "/CN=rljob-operator", "-keyout", KEY_FILE, "-out", CERTIFICATE_FILE),
)
"""P-256, valid for ten years."""


class NoCertificate(Exception):
    """The message names the files or the program, and the fix."""


class Certificate:
    """The server's side of TLS. `context` stays the same; new connections use the latest files."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` has tls.crt and tls.key. None: make a self-signed certificate. Raises NoCertificate."""
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._directory = directory
        self._loaded: list[tuple[int, int]] = []
        """Times and inodes of the files."""
        if directory is not None:
            self._load(directory)
            return
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
            _make_self_signed(made)
            self._load(Path(made))

    async def follow(self) -> None:
        """Load the files again whenever they change, until cancelled."""
        while self._directory is not None:
            await asyncio.sleep(_CHECK_EVERY_SECONDS)
            self.reload(self._directory)

    def reload(self, directory: Path) -> None:
        """Load the files if they have changed. Files that do not match are logged; the last good ones stay in use."""
        try:
            if self._load(directory):
                _log.info("certificate reloaded", directory=str(directory))
        except NoCertificate as error:
            _log.warning("certificate not reloaded", error=str(error))

    def _load(self, directory: Path) -> bool:
        """Return False if the files are those that were loaded last. Raises NoCertificate."""
        files = directory / CERTIFICATE_FILE, directory / KEY_FILE
        try:
            present = [(stat.st_mtime_ns, stat.st_ino) for stat in map(Path.stat, files)]
            if present == self._loaded:
                return False
            self._loaded = present
            # A pair that does not match would leave the context without a usable key: try it on another one first.
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(*files)
            self.context.load_cert_chain(*files)
        except OSError as error:  # also SSLError
            raise NoCertificate(
                f"expected {CERTIFICATE_FILE} and {KEY_FILE} in {directory}: {error.strerror or error}; mount a Secret "
                "of type kubernetes.io/tls there, or write a matching pair in PEM without a password"
            ) from error
        return True


async def tls_context(stack: AsyncExitStack, directory: str) -> ssl.SSLContext:
    """TLS with the certificate in the directory, which is followed until the stack is left. Empty: self-signed."""
    certificate = await asyncio.to_thread(Certificate, Path(directory) if directory else None)
    stack.callback(asyncio.create_task(certificate.follow()).cancel)
    return certificate.context


def _make_self_signed(directory: str) -> None:
    """Write the key and certificate of a new pair. Raises NoCertificate."""
    try:
        subprocess.run(_SELF_SIGNED, cwd=directory, capture_output=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCertificate(
            f"expected the program openssl to make a self-signed certificate, found an error: {error}; install it, "
            "provide a certificate with --metrics-certificate, or set --no-metrics-tls behind a service mesh"
        ) from error
