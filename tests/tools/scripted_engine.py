"""An engine whose model writes the token ids in script.json of the model folder; prompt.json has the last prompt."""

import json
from pathlib import Path

from server.fake_engine import FakeEngine, build_fake

from headstart.config.options import EngineOptions
from headstart.core.engine_info import EngineInfo
from headstart.core.request import Request

SCRIPT, PROMPT = "script.json", "prompt.json"


class ScriptedEngine(FakeEngine):
    """Every request gets the tokens that the file has when it arrives; behind them the first one again."""

    def __init__(self, knobs: dict[str, float], folder: Path) -> None:
        super().__init__(knobs)
        self._folder = folder
        self._scripts: dict[str, list[int]] = {}

    def add_request(self, request: Request) -> None:
        self._scripts[request.request_id] = json.loads((self._folder / SCRIPT).read_text(encoding="utf-8"))
        (self._folder / PROMPT).write_text(json.dumps(list(request.prompt)), encoding="utf-8")
        super().add_request(request)

    def next_token(self, request: Request, count: int) -> int:
        script = self._scripts[request.request_id]
        return script[count % len(script)]


def build_scripted(options: EngineOptions) -> tuple[FakeEngine, EngineInfo]:
    """As build_fake, with an engine that plays the script."""
    fake, info = build_fake(options)
    return ScriptedEngine(fake.knobs, Path(info.model)), info
