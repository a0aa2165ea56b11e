"""A model behind HTTP, and what every token of its answer read.

    pip install 'fenchel[serve]'
    fenchel train --out runs/demo
    python examples/serve_with_traces.py runs/demo

The server is that of ``fenchel serve``. A request with the field "fenchel" gets, per token, its
entropy and the tokens that attention read; any OpenAI client sends it as ``extra_body``.
"""

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any


def main(directory: str, prompt: str = "The people of the") -> list[dict[str, Any]]:
    """Start a server, ask for one completion with traces, and return those of its tokens."""
    command = [sys.executable, "-m", "fenchel", "serve", directory, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = next(found[0] for line in server.stdout if (found := URL.search(line)))
            answer = complete(address, Path(directory).name, prompt)
        finally:
            server.terminate()
    choice = answer["choices"][0]
    print(prompt + choice["text"])
    tokens: list[dict[str, Any]] = choice["fenchel"]
    for token in tokens:
        print(json.dumps(token)[:160])
    return tokens


URL = re.compile(r"http://[\w.:\[\]]+")


def complete(address: str, model: str, prompt: str) -> dict[str, Any]:
    """One request of the completions API, with a trace of attention."""
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    body["fenchel"] = {"entropy": True, "attention": {"top": 3}}
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


if __name__ == "__main__":
    main(*sys.argv[1:3])
