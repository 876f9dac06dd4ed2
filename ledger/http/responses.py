"""Answers as HTTP has them: a JSON body, or an error with the header that tells OpenAI's clients whether to try again."""

from __future__ import annotations

from aiohttp import web

from ledger.http.errors import ApiError

_JSON = "application/json"


def json_response(body: bytes) -> web.Response:
    return web.Response(body=body, headers={"Content-Type": _JSON})


def refusal(error: ApiError) -> web.Response:
    headers = {"Content-Type": _JSON}
    if error.retry is not None:
        headers["X-Should-Retry"] = "true" if error.retry else "false"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=error.status, body=error.body(), headers=headers)
