"""headstart serve whose diagnostics can be switched: SIGUSR1 turns them off, SIGUSR2 on again.

    python -m headstart_lab.prompts.switched_server [options of headstart serve]

Both settings are served by one process, its engine, its cache and its process for chat templates, so that overhead.py
measures what the features cost and not what two processes differ by, or that one of them has rested. The server starts
with them off. The doctor's share is the given one times TIME_ON, since it is a share of the whole server's CPU time and
the features are on for that part of it.
"""

import signal
import sys
from dataclasses import replace
from functools import cache

from headstart.__main__ import main
from headstart.config.options import ServerOptions
from headstart.core.engine_info import EngineInfo
from headstart.openai.tokenizer.tokenizer import Tokenizer
from headstart.server import run_server
from headstart.server.prompt_log import RecentBodyLog
from headstart.server.server_state import ServedModel, ServerState

TIME_ON = 1 / 3  # of overhead.py's requests


class SwitchedState(ServerState):
    """A server's state with two models, which share the engine and differ in diagnostics."""

    def make_served_model(self, info: EngineInfo) -> ServedModel:
        on = replace(self.options, doctor_share=self.options.doctor_share * TIME_ON)
        off = replace(on, diagnostics_size=0, doctor_share=0.0, prompt_rule=(), prompt_log_size=0)
        models = [(options, self._prepared(info, options)) for options in (off, on)]
        for number, (options, model) in zip((signal.SIGUSR1, signal.SIGUSR2), models, strict=True):
            signal.signal(number, lambda *_, options=options, model=model: self._switch(options, model))
        return models[0][1]

    def _prepared(self, info: EngineInfo, options: ServerOptions) -> ServedModel:
        self.options = options
        return super().make_served_model(info)

    def _switch(self, options: ServerOptions, model: ServedModel) -> None:
        self.options = options
        self.prompt_log = RecentBodyLog(options.prompt_log_size, frozenset(options.prompt_rule))
        self.start_admitting(model)


if __name__ == "__main__":
    run_server.ServerState = SwitchedState
    Tokenizer.from_folder = cache(Tokenizer.from_folder)  # one for both models
    sys.argv[1:1] = ["serve"]
    sys.exit(main())
