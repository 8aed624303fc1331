"""Downloads of exported checkpoints. A signed URL gives access to one file, without the API key, until it expires.

Files are streamed from disk, not read into memory.
"""

import hmac
import time
from hashlib import blake2b
from pathlib import Path

from aiohttp import web

from areal_serve.rejection import Rejected
from areal_serve.storage import checkpoints

EXTERNAL = "external_weights"  # kind of the checkpoints that are downloaded
VALID_S = 3600
CHUNK_BYTES = 1 << 18
SIGNED = "signed"  # name of the route that needs no key


class Downloads:
    """The two requests. `api`: prefix of all paths."""

    def __init__(self, models: Path, key: bytes, api: str) -> None:
        self._models, self._prefix = models, f"{api}/files"
        self._secret = blake2b(b"signed URLs", key=blake2b(key).digest()[:64]).digest()

    def routes(self, api: str) -> list[web.RouteDef]:
        checkpoint = "/training_runs/{model_id}/checkpoints/{kind}/{name}"
        return [
            web.get(f"{api}{checkpoint}/external_weights_urls", self._urls),
            web.get(f"{self._prefix}/{{model_id}}/{{name}}/{{file}}", self._file, name=SIGNED),
        ]

    async def _urls(self, request: web.Request) -> web.Response:
        at = request.match_info
        if at["kind"] != EXTERNAL:
            raise Rejected(f"only {EXTERNAL} are downloaded: this checkpoint is of {at['kind']!r}", status=404)
        folder = self._folder(at["model_id"], at["name"])
        expires = int(time.time()) + VALID_S
        urls = {}
        for file in sorted(_files(folder)):
            path = f"{self._prefix}/{at['model_id']}/{at['name']}/{file}"
            query = {"expires": str(expires), "signature": self._signature(path, expires)}
            urls[file] = str(request.url.origin().with_path(path).with_query(query))
        return web.json_response({"urls": urls, "expires": checkpoints.moment(expires)})

    async def _file(self, request: web.Request) -> web.StreamResponse:
        at, query = request.match_info, request.query
        path = f"{self._prefix}/{at['model_id']}/{at['name']}/{at['file']}"
        expires = query.get("expires", "")
        known = expires.isascii() and expires.isdecimal() and len(expires) < 16
        right = self._signature(path, int(expires) if known else 0)
        if not hmac.compare_digest(query.get("signature", "").encode(errors="replace"), right.encode()):
            raise Rejected("wrong signature: ask for the URLs of the checkpoint", status=403)
        if int(expires) < time.time():
            raise Rejected("expired URL: ask for the URLs of the checkpoint again", status=403)
        folder = self._folder(at["model_id"], at["name"])
        if at["file"] not in _files(folder):
            raise Rejected(f"missing file {at['file']!r}", status=404)
        return web.FileResponse(folder / at["file"], chunk_size=CHUNK_BYTES)

    def _folder(self, model_id: str, name: str) -> Path:
        return checkpoints.find(self._models, f"{checkpoints.SCHEME}{model_id}/{EXTERNAL}/{name}")[1]

    def _signature(self, path: str, expires: int) -> str:
        return blake2b(f"{path}\n{expires}".encode(), key=self._secret).hexdigest()


def _files(folder: Path) -> set[str]:
    """Those of a model, without the server's own record."""
    return {file.name for file in folder.iterdir() if file.is_file() and file.name != checkpoints.META}
