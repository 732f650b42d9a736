"""EchoedPrompt: the data that the n choices of one prompt share, built and stored once.

It holds the text of an echoed prompt and the log-probabilities of its tokens. Only the first choice requests these from
the engine (engine_requests.py); `is_complete` when all have arrived, which is with that choice's first token.
"""

from array import array

from headstart.core.batch import TokenLogprob
from headstart.openai.generation_params import GenerationParams
from headstart.openai.text.detokenizer import Detokenizer
from headstart.openai.text.logprob_table import LazyTokenEntries, LogprobTable, TokenEntry
from headstart.openai.tokenizer.tokenizer import Tokenizer


class EchoedPrompt(LazyTokenEntries):
    """One prompt of a client request; a sequence of the entries of its tokens, for an echo with logprobs."""

    def __init__(self, tokenizer: Tokenizer, token_ids: "array[int]", params: GenerationParams) -> None:
        """Slow for a long echoed prompt: call it off the event loop."""
        self.token_ids = token_ids
        self.logprobs = LogprobTable()  # of every token but the first, if requested
        self.is_complete = params.sampling.prompt_logprobs is None
        self.kept: dict[str, bytes] | None = None  # JSON of the echo, while choices that share it are encoded
        self._offsets = array("i")  # start of each token's text, if logprobs are requested
        self.text = self._read(tokenizer, params) if params.echo else ""

    def append_logprobs(self, known: tuple[TokenLogprob, ...]) -> None:
        """Append the next log-probabilities."""
        for one in known:
            self.logprobs.append(one)

    def __len__(self) -> int:
        return len(self._offsets)

    def _entry(self, index: int) -> TokenEntry:
        token_id, offset = self.token_ids[index], self._offsets[index]
        if not 0 < index <= len(self.logprobs):
            return TokenEntry(token_id, None, (), offset)
        known = self.logprobs.token_logprob_at(index - 1)
        return TokenEntry(token_id, known.logprob, known.top, offset)

    def _read(self, tokenizer: Tokenizer, params: GenerationParams) -> str:
        reader = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        texts: list[str] = []
        length = 0
        for token_id in self.token_ids:
            if params.wants_logprobs:
                self._offsets.append(length)
            texts.append(reader.push(token_id))
            length += len(texts[-1])
        texts.append(reader.finish())
        return "".join(texts)
