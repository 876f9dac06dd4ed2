"""The baseline of `benchmarks.gate`: FastAPI on uvicorn reads the JSON body and answers with a constant."""

from __future__ import annotations

import socket
import time

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

app = FastAPI()
MESSAGE = {"role": "assistant", "content": "The answer is 84."}
USAGE = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}


@app.post("/ng-rollout/{rollout_id}/v1/chat/completions")
async def chat(rollout_id: str, request: Request) -> JSONResponse:
    body = await request.json()
    choice = {"index": 0, "message": MESSAGE, "finish_reason": "stop", "logprobs": None}
    return JSONResponse(
        {
            "id": f"chatcmpl-{rollout_id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body["model"],
            "choices": [choice],
            "usage": USAGE,
        }
    )


def serve(listener: socket.socket) -> None:
    config = uvicorn.Config(app, loop="uvloop", http="httptools", log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])
